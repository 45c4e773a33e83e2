"""How records of results become files: JSON Lines and CSV (`text`), Parquet (`parquet`).

Each writer takes pages and yields bytes as they are made, so that an export of any length needs the
memory of a step. Parquet has a module of its own because its library is large: only processes that
write it load it.
"""
