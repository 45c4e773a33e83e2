"""How long ids and versions may be."""

ID_LENGTH = 64
VERSION_LENGTH = 128
