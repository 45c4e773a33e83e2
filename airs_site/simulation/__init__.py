"""The service in virtual time: the same policies as in production, over a workload of days.

`workload` says what comes, `keys` which ratings it asks for, `trace` and `generator` where it comes
from. `engine` runs it: `work` holds evaluations and the archive, `pool` the replicas, `policies`
decides. `metrics`, `bound` and `report` say how it went. Nothing here knows Django, a clock or a
network; only `trace` reads and writes files.
"""
