"""The REST API of Rating Fulfillment.

Views check who calls and what is sent, call one service and show what it returns. Bodies are read
by api_bodies, shapes are api_schema's, errors become problem documents in airs_site.problems.
"""
