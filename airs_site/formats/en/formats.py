"""Instants on admin pages: to the second, sortable, and told to be UTC."""

DATETIME_FORMAT = r"Y-m-d H:i:s\Z"
