"""Our own model server: `python -m workers.model_server`, JAX lives only here."""
