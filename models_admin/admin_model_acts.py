"""What can be done to models in the admin."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from django import forms

from models_admin import services
from models_admin.admin_acts import Act
from models_admin.models import ModelConfig, ModelKind


class ReplicasForm(forms.Form):
    """How many replicas are wanted."""

    replicas = forms.IntegerField(min_value=0, max_value=services.MAX_REPLICAS)


def _by_id(service: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
    def run(model: ModelConfig, **more: Any) -> ModelConfig:
        return service(model.pk, **more)

    return run


ACTS: Final = (
    Act(
        name="start",
        title="Start",
        service=_by_id(services.start_model),
        done="Started",
        meaning="The host agent of the pool starts replicas within seconds; they take work once "
        "they are READY.",
    ),
    Act(
        name="stop",
        title="Stop",
        service=_by_id(services.stop_model),
        done="Stopped",
        meaning="All replicas take nothing new, finish what they have and end. Work for these "
        "models waits until they are started again; deadlines go on.",
    ),
    Act(
        name="restart",
        title="Restart",
        service=_by_id(services.restart_model),
        done="Restarted",
        meaning="The replicas are replaced one at a time, while others serve. What was changed in "
        "the settings comes into force with it; a pause after failures ends.",
    ),
    Act(
        name="resize",
        title="Resize",
        service=_by_id(services.resize_model),
        done="Resized",
        meaning="So many replicas are wanted from now on, or when the model is started. The "
        "rebalancer leaves them alone for an hour.",
        form=ReplicasForm,
    ),
    Act(
        name="unpin",
        title="Let the rebalancer move its replicas again:",
        service=_by_id(services.unpin_model),
        done="Unpinned",
        on_page="Unpin",
        meaning="The rebalancer moves replicas of these models again, where their pool has it on.",
    ),
    Act(
        name="accept_version",
        title="Accept the version that its server reports:",
        service=_by_id(services.accept_version),
        done="Accepted the version of",
        on_page="Accept reported version",
        meaning="What these external servers report counts from now on. Another version is "
        "another key of the archive: what the old one rated is not taken for it.",
    ),
)


OFFERED: Final[Mapping[str, tuple[str, ...]]] = {
    ModelKind.HOSTED: ("start", "stop", "restart", "resize", "unpin"),
    ModelKind.EXTERNAL: ("accept_version",),
}
"""Acts that a model's own page offers; the list offers all, and says which were refused."""
