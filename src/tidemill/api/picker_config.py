"""EndpointPickerConfig: which plugins the picker runs, in the file format that users of the original have.

The file is read strictly: a field nobody knows is an error, because a mistyped one would silently change who
serves a request. What a plugin's `parameters` may hold is for the plugin to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from tidemill.api.durations import parse_duration
from tidemill.api.layers import read_document
from tidemill.api.model import StrictModel

API_GROUPS = (
    "llm-d.ai",
    "inference.networking.x-k8s.io",
    "config.apix.gateway-api-inference-extension.sigs.k8s.io",
)
KIND = "EndpointPickerConfig"
FEATURE_GATES: Mapping[str, bool] = {
    "flowControl": False,
    # The original's standbys watch too; ours always do, so the gate changes nothing.
    "haPopulateNonLeaderDatastore": True,
}
_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def _quantity(value: object) -> int:
    """A Kubernetes quantity that counts whole things, such as 5000, 1k or 1Gi."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+)([kMGT]i?|Ki)?", str(value))
    if match is None:
        raise ValueError("must be a quantity such as 5000, 1k or 1Gi")
    return int(match[1]) * _SUFFIXES[match[2] or ""]


def _seconds(value: object) -> float:
    if not isinstance(value, str):
        raise ValueError("must be a duration such as 60s")  # noqa: TRY004  pydantic turns ValueError into an error of the field
    return parse_duration(value)


Quantity = Annotated[int, BeforeValidator(_quantity), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]


class PluginSpec(StrictModel):
    type: Annotated[str, Field(min_length=1)]
    name: str = ""
    parameters: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_after_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name"):
            return {**data, "name": data.get("type", "")}
        return data


class ProfilePlugin(StrictModel):
    plugin_ref: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(ge=0)] = 1.0


class SchedulingProfile(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    plugins: tuple[ProfilePlugin, ...] = ()


class PluginReference(StrictModel):
    plugin_ref: str = ""


class PriorityBand(StrictModel):
    """Limits and policies of one priority, or the template of those not listed. 0 means the default."""

    priority: int = 0
    max_requests: Quantity = 0
    max_bytes: Quantity = 0
    fairness_policy_ref: str = "global-strict-fairness-policy"
    ordering_policy_ref: str = "fcfs-ordering-policy"


class FlowControl(StrictModel):
    """Times in seconds. A limit of 0 is none; a time to live of 0 never expires."""

    max_requests: Quantity = 0
    max_bytes: Quantity = 0
    default_request_ttl: Annotated[Seconds, Field(alias="defaultRequestTTL")] = 60.0
    no_endpoint_request_ttl: Annotated[Seconds | None, Field(alias="noEndpointRequestTTL")] = None
    default_priority_band: PriorityBand = PriorityBand()
    default_negative_priority_band: PriorityBand | None = None
    priority_bands: tuple[PriorityBand, ...] = ()
    saturation_detector: PluginReference = PluginReference()


class DataLayerSource(StrictModel):
    plugin_ref: str
    extractors: tuple[PluginReference, ...] = ()


class DataLayer(StrictModel):
    sources: tuple[DataLayerSource, ...] = ()
    inject_defaults: bool = True


class RequestHandler(StrictModel):
    parsers: tuple[PluginReference, ...] = ()


class EndpointPickerConfig(StrictModel):
    api_version: str = "llm-d.ai/v1alpha1"
    kind: str = KIND
    feature_gates: tuple[str, ...] = ()
    plugins: tuple[PluginSpec, ...] = ()
    scheduling_profiles: tuple[SchedulingProfile, ...] = ()
    data_layer: DataLayer = DataLayer()
    flow_control: FlowControl = FlowControl()
    request_handler: RequestHandler = RequestHandler()
    saturation_detector: PluginReference = PluginReference()
    parser: PluginReference = PluginReference()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        group = self.api_version.rpartition("/")[0]
        if group not in API_GROUPS:
            raise ValueError(f"apiVersion {self.api_version!r} must be of the group {API_GROUPS[0]}")
        if self.kind != KIND:
            raise ValueError(f"kind {self.kind!r} must be {KIND}")
        for what, names in (
            ("plugins", [plugin.name for plugin in self.plugins]),
            ("schedulingProfiles", [profile.name for profile in self.scheduling_profiles]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what}: name {twice[0]!r} must be unique")
        for gate in self.feature_gates:
            name, _, state = gate.partition("=")
            if name not in FEATURE_GATES:
                raise ValueError(f"featureGates: {gate!r} must be one of {', '.join(FEATURE_GATES)}")
            if state not in ("", "true", "false"):
                raise ValueError(f"featureGates: {gate!r} must end with =true or =false")
        return self

    def enabled(self, gate: str) -> bool:
        """Whether a feature gate is on; the last mention counts."""
        state = FEATURE_GATES[gate]
        for entry in self.feature_gates:
            name, _, value = entry.partition("=")
            if name == gate:
                state = value != "false"
        return state

    @property
    def detector_ref(self) -> str:
        """The saturation detector; the older top-level place counts when the newer is empty."""
        return self.flow_control.saturation_detector.plugin_ref or self.saturation_detector.plugin_ref

    @classmethod
    def parse(cls, text: str, *, source: str) -> EndpointPickerConfig:
        """Read YAML. `source` names it in errors. Raises InvalidObjectError."""
        return read_document(cls, text, object_name=f"{KIND} {source}")
