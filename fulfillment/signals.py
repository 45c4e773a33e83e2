"""The hook for Python code that wants to hear of finished workflows.

    from fulfillment.signals import workflow_finished

    @workflow_finished.connect
    def note(sender, *, event_id, workflow_id, round, state, data, **_): ...

Connect in a module that the control worker imports (`AppConfig.ready` of an installed app, or a
module in CELERY_IMPORTS). It is sent by whoever runs the outbox: the control worker, or the
dispatcher when that one is late. At least once an event: a process that dies between sending it and
noting that leaves it to be sent again, with the same `event_id`. It is no part of any transaction;
a receiver that raises is logged and not called again, and must not take longer than a moment, for
other events wait meanwhile: have it start a task of your own.
"""

from django.dispatch import Signal

workflow_finished = Signal()
