"""The REST API of model management: pools and models.

Everybody with a token reads, operators write. Secrets go in and never come out. Views check types
and unknown fields, call one service and show what it returns; errors become problem documents in
the site.
"""
