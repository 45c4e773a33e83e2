"""Models as they are configured, and what is wanted of them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from django.db import models
from django.db.models import F, Q

from models_admin.models.lengths import ID_LENGTH, VERSION_LENGTH
from models_admin.models.pools import AcceleratorPool


class ModelKind(models.TextChoices):
    """Who runs the model's servers."""

    HOSTED = "hosted"
    EXTERNAL = "external"


class Protocol(models.TextChoices):
    """How a model is called."""

    OIP = "oip"
    OPENAI = "openai"


class ScoringEndpoint(models.TextChoices):
    """By which endpoint of an OpenAI-compatible server pairs of query and text are scored."""

    SCORE = "score", "/v1/score: vLLM"
    RERANK = "rerank", "/rerank: vLLM, SGLang, llama.cpp, Infinity, Cohere, Jina"
    TEI_RERANK = "tei_rerank", "/rerank of Text Embeddings Inference"
    EMBEDDINGS = "embeddings", "/v1/embeddings: scores are cosines"


CHAT: Final = "chat"
"""What an OpenAI-compatible server is asked by where it scores no pairs."""


class PriorityStyle(models.TextChoices):
    """In whose direction a server is told how urgent a call is."""

    TRITON = "triton", "Triton: 1 first"
    VLLM = "vllm", "vLLM: the lowest number first"
    SGLANG = "sglang", "SGLang: the highest number first"


STYLES: Mapping[str, Sequence[PriorityStyle]] = {
    Protocol.OIP: [PriorityStyle.TRITON],
    Protocol.OPENAI: [PriorityStyle.VLLM, PriorityStyle.SGLANG],
}
"""What the servers of a protocol may know, the usual one first."""
NO_PRIORITY = "none"


class ModelConfig(models.Model):
    """A model that raters are bound to: hosted from a checkpoint, or external at a URL."""

    id = models.SlugField(primary_key=True, max_length=ID_LENGTH)
    kind = models.CharField(max_length=8, choices=ModelKind.choices)
    protocol = models.CharField(max_length=8, choices=Protocol.choices, default=Protocol.OIP)
    endpoint = models.CharField(
        max_length=10,
        blank=True,
        default="",
        choices=ScoringEndpoint.choices,
        help_text="By which endpoint an OpenAI-compatible server scores query and text; empty: it "
        "is a chat model",
    )
    model_name = models.CharField(max_length=256, help_text="Name that its server knows it by")
    version = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        help_text="What it serves: the checkpoint's version, or what an external server reported",
    )
    version_label = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        help_text="The operator's name for what an external server serves: it stands for the first "
        "version known under it, and another name is another archive key",
    )
    first_version = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        editable=False,
        help_text="What the label of an external model stands for",
    )
    reported = models.CharField(
        max_length=VERSION_LENGTH,
        blank=True,
        default="",
        editable=False,
        help_text="Another version that an external server reported since, to be accepted",
    )
    timeout_s = models.FloatField(default=60.0, help_text="Total time of one call")
    sends_priority = models.BooleanField(default=False, help_text="Its server knows priorities")
    priority_style = models.CharField(
        max_length=8,
        blank=True,
        default="",
        choices=PriorityStyle.choices,
        help_text="In whose direction it is told them; empty: Triton's, of chat servers vLLM's",
    )

    # External
    url = models.CharField(max_length=2048, blank=True, default="")
    api_key = models.TextField(blank=True, default="", editable=False, help_text="Sealed")
    headers = models.JSONField(
        default=dict, blank=True, editable=False, help_text="Sealed value by name"
    )
    max_concurrency = models.PositiveIntegerField(
        default=16, help_text="Calls an external server may hold; an OIP batch is one"
    )

    # Hosted
    pool = models.ForeignKey(
        AcceleratorPool, null=True, blank=True, on_delete=models.PROTECT, related_name="models"
    )
    loader = models.CharField(max_length=32, blank=True, default="")
    checkpoint = models.CharField(
        max_length=1024,
        blank=True,
        default="",
        help_text="pkg:PACKAGE/PATH, or a path under AIRS_CHECKPOINT_ROOT",
    )
    serving = models.JSONField(default=dict, blank=True, help_text="Options of the model server")
    devices_per_replica = models.PositiveSmallIntegerField(default=1)
    replicas_min = models.PositiveSmallIntegerField(default=0)
    replicas_default = models.PositiveSmallIntegerField(default=1)
    replicas_max = models.PositiveSmallIntegerField(default=1)
    window = models.PositiveSmallIntegerField(
        default=16, help_text="Batches that a replica may hold, computing and queued"
    )
    tunes_window = models.BooleanField(
        default=True,
        help_text="The window is where it begins, and becomes the smallest that keeps replicas "
        "busy; else it stays as it is",
    )

    pinned = models.BooleanField(
        default=False, help_text="The rebalancer leaves its replicas as they are"
    )
    pinned_until = models.DateTimeField(
        null=True, editable=False, help_text="The same for a while, as somebody resized it"
    )
    start_up_s = models.FloatField(
        null=True, editable=False, help_text="From start to ready, as its replicas last took"
    )

    # Desired state
    started = models.BooleanField(default=False, editable=False)
    wanted_replicas = models.PositiveSmallIntegerField(default=1, editable=False)
    restart_generation = models.PositiveIntegerField(default=0, editable=False)

    created_at = models.DateTimeField(editable=False)
    updated_at = models.DateTimeField(editable=False)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=ModelKind.values), name="model_kind"),
            models.CheckConstraint(
                condition=Q(protocol__in=Protocol.values), name="model_protocol"
            ),
            models.CheckConstraint(
                condition=Q(kind=ModelKind.HOSTED, url="", protocol=Protocol.OIP)
                & ~Q(checkpoint="")
                & ~Q(loader="")
                | Q(kind=ModelKind.EXTERNAL, checkpoint="", loader="", pool=None, started=False)
                & ~Q(url=""),
                name="model_hosted_or_external",
            ),
            models.CheckConstraint(
                condition=Q(first_version="", reported="")
                | Q(kind=ModelKind.EXTERNAL) & ~Q(version=""),
                name="model_reports",
            ),
            models.CheckConstraint(
                condition=Q(endpoint="")
                | Q(protocol=Protocol.OPENAI, endpoint__in=ScoringEndpoint.values),
                name="model_endpoint",
            ),
            models.CheckConstraint(condition=Q(timeout_s__gt=0), name="model_timeout"),
            models.CheckConstraint(
                condition=Q(priority_style__in=["", *PriorityStyle.values]),
                name="model_priority_style",
            ),
            models.CheckConstraint(
                condition=Q(max_concurrency__gte=1, window__gte=1, devices_per_replica__gte=1),
                name="model_room",
            ),
            models.CheckConstraint(
                condition=Q(
                    replicas_min__lte=F("replicas_default"),
                    replicas_default__lte=F("replicas_max"),
                    replicas_max__gte=1,
                    wanted_replicas__lte=F("replicas_max"),
                ),
                name="model_replicas",
            ),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def target_replicas(self) -> int:
        """How many replicas should live now."""
        return self.wanted_replicas if self.started else 0

    def is_pinned(self, now: datetime) -> bool:
        """Whether the rebalancer leaves its replicas as they are."""
        return self.pinned or (self.pinned_until is not None and now < self.pinned_until)

    @property
    def agent(self) -> str:
        """Name of the host agent that runs it; it needs `pool`."""
        return self.pool.agent if self.pool else "local"

    @property
    def rater_protocol(self) -> str:
        """The protocol of the autoraters that can use it: `oip` for all that take rows."""
        return Protocol.OIP if self.endpoint else self.protocol

    @property
    def spoken_priority(self) -> str:
        """In whose direction its servers are told urgency, or that they are not."""
        if self.kind == ModelKind.HOSTED:
            return PriorityStyle.TRITON
        if self.endpoint == ScoringEndpoint.TEI_RERANK:
            return NO_PRIORITY
        usual = STYLES[self.protocol][0]
        return (self.priority_style or usual) if self.sends_priority else NO_PRIORITY

    @property
    def served_version(self) -> str:
        """What people are shown: what is served, or its label while a server reported nothing."""
        return self.version or self.version_label

    @property
    def key_version(self) -> str:
        """What raters are pinned to and the archive goes by.

        Of an external model it is the label alone, before and after the server first reports: when
        it does must not matter. Any other version is added to it (no label holds a tab), and so is
        an endpoint that scores: by another one the same model scores otherwise.
        """
        if self.kind == ModelKind.HOSTED:
            return self.version
        other = "" if self.version == self.first_version else self.version
        return "\t".join([self.version_label, other, self.endpoint]).rstrip("\t")
