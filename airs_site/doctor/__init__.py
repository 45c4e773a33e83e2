"""What is wrong with a deployment and how to mend it: `manage.py doctor`.

`examine` asks this host, PostgreSQL, the broker and the queue (fulfillment.doctor), and goes on
when one of them is away.
"""
