"""The service in virtual time: the same policies as in production, over a workload of days.

`workload` says what comes, `keys` which ratings it asks for, `trace` and `generator` where it comes
from. `engine` runs it: `work` holds evaluations and the archive, `pool` the replicas, `policies`
decides. `kept` runs it with batches that stay as intake cut them (`cuts`), as production's do.
`scenes` names what else is tried: `disturbances`, other `pools`, other ratings (`rewriting`),
layers switched off. `cell` runs one policy through one of them, `campaign` all of them, `cells` in
several processes. `metrics`, `series`, `bound` and `report` say how it went, `tables`, `plots` and
`page` show it. Nothing here knows Django, a clock or a network; only `trace` reads and writes
files.
"""
