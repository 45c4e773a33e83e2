"""Which version of an external model counts, and what its label stands for.

A server tells its version with its first answer, but rows are submitted before that. So the first
version known under a label is what the label stands for, and the archive's key (`key_version` of a
model) is the label alone for it, whenever it becomes known. What a label stands for never changes:
a label and a version are one key for good, whatever was accepted or renamed in between, and no two
versions ever share one.
"""

from models_admin.models import ModelConfig, ModelLabel


def settle(model: ModelConfig, found: str = "") -> None:
    """Let `found` count, or what the model's label stands for; "" while that is not known.

    For an external model whose row the caller holds locked and saves.
    """
    of_label = ModelLabel.objects.filter(model_id=model.pk, label=model.version_label)
    if found:
        label, _ = of_label.get_or_create(
            model_id=model.pk, label=model.version_label, defaults={"version": found}
        )
        model.first_version = label.version
    else:
        model.first_version = of_label.values_list("version", flat=True).first() or ""
    model.version = found or model.first_version
    model.reported = ""
