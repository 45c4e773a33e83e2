"""Causal decoders that score a query and a text read as one: the loader `decoder_score`."""
