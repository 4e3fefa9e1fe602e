"""What any Kubernetes API server does, as far as this project and its users' kubectl rely on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from tests.contract.conftest import KUBECONFIG
from tests.definitions import CRDS, define, defined, is_gone, plain_crd
from tests.polling import eventually
from tidemill.api.crd import variant_autoscaling_crd
from tidemill.api.inference_crd import inference_crds
from tidemill.cli.doctor.fleet import SERVICES
from tidemill.kube.client import KubeClient, PatchType, WatchEvent
from tidemill.kube.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from tidemill.kube.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    NAMESPACES,
    PODS,
    REPLICA_SETS,
    Json,
    Resource,
)
from tidemill.local.controllers.leaderworkerset import leader_worker_set_crd


def config_map(name: str, data: dict[str, str] | None = None, **metadata: object) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **metadata}, "data": data or {}}


def deployment(name: str, replicas: int = 1) -> Json:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "main", "image": "none", "command": ["sleep", "1"]}]},
            },
        },
    }


POD_SPEC: Json = {"containers": [{"name": "main", "image": "none"}]}
NO_IMAGE: Json = {"containers": [{"name": "main"}]}


def scaler(**spec: int) -> Json:
    return {"spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}, **spec}}


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("resource", "body", "words"),
        [
            (PODS, {"spec": NO_IMAGE}, r"spec.containers\[0\].image: Required value"),
            (PODS, {"spec": {"containers": []}}, r"spec.containers: Required value"),
            (SERVICES, {"spec": {"selector": {"a": "b"}}}, r"spec.ports: Required value"),
            (SERVICES, {}, r"spec.ports: Required value"),
            (HORIZONTAL_POD_AUTOSCALERS, {}, r"spec.scaleTargetRef.kind: Required value"),
            (HORIZONTAL_POD_AUTOSCALERS, scaler(), r"spec.maxReplicas: Required value: must be set"),
            (
                HORIZONTAL_POD_AUTOSCALERS, scaler(minReplicas=3, maxReplicas=2),
                r"spec.maxReplicas: Invalid value: 2: must be greater than or equal to `minReplicas`",
            ),
            (
                HORIZONTAL_POD_AUTOSCALERS, scaler(minReplicas=-1, maxReplicas=2),
                r"spec.minReplicas: Invalid value: -1: must be greater than or equal to",
            ),
            (
                HORIZONTAL_POD_AUTOSCALERS, scaler(minReplicas=0, maxReplicas=2),
                r"must specify at least one Object or External metric to support scaling to zero replicas",
            ),
        ],
    )  # fmt: skip
    async def test_objects(
        self, api: KubeClient, namespace: str, resource: Resource, body: Json, words: str
    ) -> None:
        with pytest.raises(InvalidError, match=words):
            await api.create(resource, {"metadata": {"name": "x"}, **body}, namespace)

    async def test_a_template_without_an_image(self, api: KubeClient, namespace: str) -> None:
        body = deployment("x")
        del body["spec"]["template"]["spec"]["containers"][0]["image"]
        with pytest.raises(InvalidError, match=r"spec.template.spec.containers\[0\].image: Required value"):
            await api.create(DEPLOYMENTS, body, namespace)

    async def test_binary_data_that_is_no_base64(self, api: KubeClient, namespace: str) -> None:
        body = {"metadata": {"name": "x"}, "binaryData": {"k": "!"}}
        with pytest.raises(ApiError, match="illegal base64 data") as caught:
            await api.create(CONFIG_MAPS, body, namespace)
        assert caught.value.code == 400

    async def test_a_pod_stays_as_it_was_made(self, api: KubeClient, namespace: str) -> None:
        await api.create(PODS, {"metadata": {"name": "x"}, "spec": POD_SPEC}, namespace)
        container = {**POD_SPEC["containers"][0], "image": "other"}
        await api.patch(PODS, "x", {"spec": {"containers": [container]}}, namespace)
        other = {"containers": [{**container, "args": ["--other"]}]}
        with pytest.raises(InvalidError, match="pod updates may not change fields other than"):
            await api.patch(PODS, "x", {"spec": other}, namespace)
        with pytest.raises(InvalidError, match="pod updates may not change fields other than"):
            await api.patch(PODS, "x", {"spec": {"nodeSelector": {"a": "b"}}}, namespace)

    async def test_a_custom_resource_in_a_group_of_kubernetes(self, api: KubeClient) -> None:
        crd = plain_crd("test.tidemill.k8s.io", "v1", "widgets", "Widget")
        del crd["metadata"]["annotations"]
        with pytest.raises(InvalidError, match=r"\[api-approved.kubernetes.io\]: Required value"):
            await api.create(CRDS, crd)


@pytest.mark.parametrize("crd", [*inference_crds(), leader_worker_set_crd()], ids=lambda c: c["metadata"]["name"])
async def test_the_custom_resources_that_the_command_prints_are_taken(api: KubeClient, crd: Json) -> None:
    async with defined(api, crd):
        pass


class TestObjects:
    async def test_a_list_says_once_what_is_in_it(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("a"), namespace)
        listed = orjson.loads(await api.get_raw(CONFIG_MAPS.path(namespace)))
        assert (listed["apiVersion"], listed["kind"]) == ("v1", "ConfigMapList")
        assert all("kind" not in item and "apiVersion" not in item for item in listed["items"])

    async def test_create_fills_in_what_the_server_owns(self, api: KubeClient, namespace: str) -> None:
        made = await api.create(CONFIG_MAPS, config_map("a", {"k": "v"}), namespace)
        metadata = made["metadata"]
        assert metadata["uid"]
        assert metadata["resourceVersion"]
        assert metadata["creationTimestamp"]
        assert await api.get(CONFIG_MAPS, "a", namespace) == made

    async def test_names_are_unique_and_checked(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("a"), namespace)
        with pytest.raises(AlreadyExistsError, match='configmaps "a" already exists'):
            await api.create(CONFIG_MAPS, config_map("a"), namespace)
        with pytest.raises(InvalidError, match=r"metadata.name: Invalid value: .*RFC 1123"):
            await api.create(CONFIG_MAPS, config_map("Not_A_Name"), namespace)

    async def test_generate_name(self, api: KubeClient, namespace: str) -> None:
        body = config_map("x")
        body["metadata"] = {"generateName": "run-"}
        names = {(await api.create(CONFIG_MAPS, body, namespace))["metadata"]["name"] for _ in range(3)}
        assert len(names) == 3
        assert all(name.startswith("run-") and len(name) == 9 for name in names)

    async def test_missing_objects_kinds_and_namespaces(self, api: KubeClient, namespace: str) -> None:
        with pytest.raises(NotFoundError, match='configmaps "nope" not found'):
            await api.get(CONFIG_MAPS, "nope", namespace)
        with pytest.raises(NotFoundError, match='namespaces "nowhere" not found'):
            await api.create(CONFIG_MAPS, config_map("a"), "nowhere")
        with pytest.raises(NotFoundError, match="404 page not found"):
            await api.list(Resource("no.such", "v1", "things", "Thing"))
        with pytest.raises(NotFoundError, match="could not find the requested resource"):
            await api.list(Resource("apps", "v1", "things", "Thing"))

    async def test_a_stale_write_is_refused(self, api: KubeClient, namespace: str) -> None:
        first = await api.create(CONFIG_MAPS, config_map("a", {"n": "1"}), namespace)
        await api.replace(CONFIG_MAPS, {**first, "data": {"n": "2"}}, namespace)
        with pytest.raises(ConflictError, match="the object has been modified"):
            await api.replace(CONFIG_MAPS, {**first, "data": {"n": "3"}}, namespace)

    async def test_a_write_that_changes_nothing_is_no_write(self, api: KubeClient, namespace: str) -> None:
        made = await api.create(CONFIG_MAPS, config_map("a", {"n": "1"}), namespace)
        again = await api.patch(CONFIG_MAPS, "a", {"data": {"n": "1"}}, namespace)
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]

    async def test_deletion_by_identity(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("a"), namespace)
        with pytest.raises(ConflictError, match=r"the UID in the precondition \(0{8}-.*\) does not match the UID"):
            await api.delete(CONFIG_MAPS, "a", namespace, uid="00000000-0000-0000-0000-000000000000")
        assert await api.delete(CONFIG_MAPS, "a", namespace)
        assert not await api.delete(CONFIG_MAPS, "a", namespace)

    async def test_finalizers_keep_an_object(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("a", finalizers=["test/hold"]), namespace)
        await api.delete(CONFIG_MAPS, "a", namespace)
        held = await api.get(CONFIG_MAPS, "a", namespace)
        assert held["metadata"]["deletionTimestamp"]
        await api.patch(CONFIG_MAPS, "a", {"metadata": {"finalizers": None}}, namespace)
        with pytest.raises(NotFoundError):
            await api.get(CONFIG_MAPS, "a", namespace)


class TestSelection:
    @pytest.mark.parametrize(
        ("selector", "names"),
        [
            ("tier=web", "ab"), ("tier==web,env=prod", "a"), ("tier!=web", "cd"), ("tier in (web, db)", "abc"),
            ("tier notin (web)", "cd"), ("env", "ab"), ("!env", "cd"), ("tier=web,!env", ""), ("", "abcd"),
        ],
    )  # fmt: skip
    async def test_labels(self, api: KubeClient, namespace: str, selector: str, names: str) -> None:
        for name, labels in {
            "a": {"tier": "web", "env": "prod"}, "b": {"tier": "web", "env": "dev"}, "c": {"tier": "db"}, "d": {},
        }.items():  # fmt: skip
            await api.create(CONFIG_MAPS, config_map(name, labels=labels), namespace)
        page = await api.list(CONFIG_MAPS, namespace, label_selector=selector)
        found = "".join(i["metadata"]["name"] for i in page.items if i["metadata"]["name"] in "abcd")
        assert found == names

    async def test_fields(self, api: KubeClient, namespace: str) -> None:
        for name in ("a", "b"):
            await api.create(CONFIG_MAPS, config_map(name), namespace)
        page = await api.list(CONFIG_MAPS, namespace, field_selector="metadata.name=b")
        assert [i["metadata"]["name"] for i in page.items] == ["b"]
        with pytest.raises(ApiError, match=r'"data.x" is not a known field selector: only "metadata.name"'):
            await api.list(CONFIG_MAPS, namespace, field_selector="data.x=1")
        with pytest.raises(ApiError, match=r"field label not supported: spec.color"):
            await api.list(PODS, namespace, field_selector="spec.color=red")

    async def test_pages_show_one_moment(self, api: KubeClient, namespace: str) -> None:
        for number in range(5):
            await api.create(CONFIG_MAPS, config_map(f"cm-{number}"), namespace)
        first = await api.list(CONFIG_MAPS, namespace, limit=2, label_selector="")
        await api.delete(CONFIG_MAPS, "cm-4", namespace)
        seen = [i["metadata"]["name"] for i in first.items]
        token, version = first.continue_token, first.resource_version
        while token:
            page = await api.list(CONFIG_MAPS, namespace, limit=2, continue_token=token)
            assert page.resource_version == version
            seen += [i["metadata"]["name"] for i in page.items]
            token = page.continue_token
        assert [name for name in seen if name.startswith("cm-")] == [f"cm-{n}" for n in range(5)]


class TestPatches:
    async def test_merge(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("a", {"x": "1", "y": "2"}), namespace)
        found = await api.patch(CONFIG_MAPS, "a", {"data": {"x": None, "z": "3"}}, namespace)
        assert found["data"] == {"y": "2", "z": "3"}

    async def test_json(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("a", {"x": "1"}), namespace)
        operations = [
            {"op": "test", "path": "/data/x", "value": "1"},
            {"op": "add", "path": "/data/y", "value": "2"},
        ]
        found = await api.patch(CONFIG_MAPS, "a", operations, namespace, type=PatchType.JSON)
        assert found["data"] == {"x": "1", "y": "2"}
        wrong = [{"op": "test", "path": "/data/x", "value": "9"}]
        with pytest.raises(InvalidError):
            await api.patch(CONFIG_MAPS, "a", wrong, namespace, type=PatchType.JSON)

    async def test_strategic_merge_goes_by_key(self, api: KubeClient, namespace: str) -> None:
        await api.create(DEPLOYMENTS, deployment("a"), namespace)
        env = [{"name": "main", "env": [{"name": "A", "value": "1"}]}, {"name": "side", "image": "none"}]
        patch = {"spec": {"template": {"spec": {"containers": env}}}}
        found = await api.patch(DEPLOYMENTS, "a", patch, namespace, type=PatchType.STRATEGIC)
        containers = {c["name"]: c for c in found["spec"]["template"]["spec"]["containers"]}
        assert containers["main"]["command"] == ["sleep", "1"]
        assert containers["main"]["env"] == [{"name": "A", "value": "1"}]
        gone = {"spec": {"template": {"spec": {"containers": [{"name": "side", "$patch": "delete"}]}}}}
        found = await api.patch(DEPLOYMENTS, "a", gone, namespace, type=PatchType.STRATEGIC)
        assert [c["name"] for c in found["spec"]["template"]["spec"]["containers"]] == ["main"]


async def apply(
    api: KubeClient, resource: Resource, body: Json, namespace: str, manager: str, *, force: bool = False
) -> Json:
    path = resource.path(namespace, body["metadata"]["name"])
    query = {"fieldManager": manager, **({"force": "true"} if force else {})}
    return await api._json("PATCH", path, query=query, body=body, content_type=PatchType.APPLY)


class TestServerSideApply:
    async def test_creates_and_owns(self, api: KubeClient, namespace: str) -> None:
        made = await apply(api, CONFIG_MAPS, config_map("a", {"x": "1"}), namespace, "one")
        (entry,) = made["metadata"]["managedFields"]
        assert (entry["manager"], entry["operation"]) == ("one", "Apply")
        assert entry["fieldsV1"] == {"f:data": {"f:x": {}}}

    async def test_a_field_that_is_no_longer_applied_goes(self, api: KubeClient, namespace: str) -> None:
        await apply(api, CONFIG_MAPS, config_map("a", {"x": "1", "y": "2"}), namespace, "one")
        found = await apply(api, CONFIG_MAPS, config_map("a", {"x": "1"}), namespace, "one")
        assert found["data"] == {"x": "1"}

    async def test_conflicts_name_the_other_and_force_takes_over(self, api: KubeClient, namespace: str) -> None:
        await apply(api, CONFIG_MAPS, config_map("a", {"x": "1", "y": "2"}), namespace, "one")
        with pytest.raises(ConflictError, match=r'conflict.* with "two"|conflict.*"one".*\.data\.x'):
            await apply(api, CONFIG_MAPS, config_map("a", {"x": "9"}), namespace, "two")
        await apply(api, CONFIG_MAPS, config_map("a", {"x": "9"}), namespace, "two", force=True)
        # What the first one has lost it does not take away by dropping it.
        found = await apply(api, CONFIG_MAPS, config_map("a", {}), namespace, "one")
        assert found["data"] == {"x": "9"}

    async def test_agreement_is_no_conflict(self, api: KubeClient, namespace: str) -> None:
        await apply(api, CONFIG_MAPS, config_map("a", {"x": "1"}), namespace, "one")
        await apply(api, CONFIG_MAPS, config_map("a", {"x": "1"}), namespace, "two")
        found = await apply(api, CONFIG_MAPS, config_map("a", {}), namespace, "one")
        assert found["data"] == {"x": "1"}

    async def test_an_update_takes_ownership(self, api: KubeClient, namespace: str) -> None:
        await apply(api, CONFIG_MAPS, config_map("a", {"x": "1"}), namespace, "one")
        await api.patch(CONFIG_MAPS, "a", {"data": {"x": "2"}}, namespace)
        with pytest.raises(ConflictError):
            await apply(api, CONFIG_MAPS, config_map("a", {"x": "1"}), namespace, "one")

    async def test_items_of_keyed_lists_belong_to_whoever_applied_them(
        self, api: KubeClient, namespace: str
    ) -> None:
        await apply(api, DEPLOYMENTS, deployment("a"), namespace, "one")
        addition: Json = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "a"},
            "spec": {"template": {"spec": {"containers": [{"name": "side", "image": "other"}]}}},
        }
        both = await apply(api, DEPLOYMENTS, addition, namespace, "two")
        assert [c["name"] for c in both["spec"]["template"]["spec"]["containers"]] == ["main", "side"]
        again = await apply(api, DEPLOYMENTS, deployment("a"), namespace, "one")
        assert [c["name"] for c in again["spec"]["template"]["spec"]["containers"]] == ["main", "side"]
        addition["spec"] = {"template": {"metadata": {"labels": {"extra": "1"}}}}
        without = await apply(api, DEPLOYMENTS, addition, namespace, "two")
        assert [c["name"] for c in without["spec"]["template"]["spec"]["containers"]] == ["main"]


class TestSubresources:
    async def test_scale(self, api: KubeClient, namespace: str) -> None:
        await api.create(DEPLOYMENTS, deployment("a", 2), namespace)
        scale = await api._json("GET", DEPLOYMENTS.path(namespace, "a", "scale"))
        assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 2)
        assert scale["status"]["selector"] == "app=a"
        await api.scale(DEPLOYMENTS, "a", namespace, 5)
        found = await api.get(DEPLOYMENTS, "a", namespace)
        assert found["spec"]["replicas"] == 5
        assert found["metadata"]["generation"] == 2
        with pytest.raises(ApiError, match="greater than or equal to 0"):
            await api.scale(DEPLOYMENTS, "a", namespace, -1)

    async def test_status_and_spec_keep_apart(self, api: KubeClient, namespace: str) -> None:
        await api.create(DEPLOYMENTS, deployment("a"), namespace)
        both = {"spec": {"replicas": 9}, "status": {"observedGeneration": 1, "replicas": 4}}
        found = await api.patch(DEPLOYMENTS, "a", both, namespace, sub="status")
        assert (found["spec"]["replicas"], found["status"]["replicas"]) == (1, 4)
        found = await api.patch(DEPLOYMENTS, "a", both, namespace)
        assert (found["spec"]["replicas"], found["status"]["replicas"]) == (9, 4)

    async def test_a_selector_must_match_its_template(self, api: KubeClient, namespace: str) -> None:
        body = deployment("a")
        body["spec"]["template"]["metadata"]["labels"] = {"app": "other"}
        with pytest.raises(InvalidError, match="`selector` does not match template `labels`"):
            await api.create(DEPLOYMENTS, body, namespace)


async def collect(events: AsyncIterator[WatchEvent], count: int, *, bookmarks: bool = False) -> list[WatchEvent]:
    found: list[WatchEvent] = []
    async with asyncio.timeout(10):
        async for event in events:
            if event.type != "BOOKMARK" or bookmarks:
                found.append(event)
            if len(found) == count:
                break
    return found


class TestWatch:
    def watch(self, api: KubeClient, namespace: str, version: str, **selectors: str) -> AsyncIterator[WatchEvent]:
        return api.watch(
            CONFIG_MAPS, namespace, resource_version=version, timeout_seconds=20, grace=5, **selectors
        )

    async def test_everything_after_a_version_in_order(self, api: KubeClient, namespace: str) -> None:
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        await api.create(CONFIG_MAPS, config_map("a", {"n": "1"}), namespace)
        await api.patch(CONFIG_MAPS, "a", {"data": {"n": "2"}}, namespace)
        await api.delete(CONFIG_MAPS, "a", namespace)
        events = [e for e in await collect(self.watch(api, namespace, start, field_selector="metadata.name=a"), 3)]
        assert [e.type for e in events] == ["ADDED", "MODIFIED", "DELETED"]
        versions = [int(e.object["metadata"]["resourceVersion"]) for e in events]
        assert versions == sorted(set(versions))

    async def test_resuming_from_any_event_misses_nothing(self, api: KubeClient, namespace: str) -> None:
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        for number in range(4):
            await api.create(CONFIG_MAPS, config_map(f"cm-{number}"), namespace)
        (first,) = await collect(self.watch(api, namespace, start), 1)
        rest = await collect(self.watch(api, namespace, first.object["metadata"]["resourceVersion"]), 3)
        assert [e.object["metadata"]["name"] for e in [first, *rest]] == [f"cm-{n}" for n in range(4)]

    async def test_leaving_a_selection_is_a_deletion(self, api: KubeClient, namespace: str) -> None:
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        await api.create(CONFIG_MAPS, config_map("a", labels={"on": "1"}), namespace)
        await api.patch(CONFIG_MAPS, "a", {"metadata": {"labels": {"on": "0"}}}, namespace)
        await api.patch(CONFIG_MAPS, "a", {"metadata": {"labels": {"on": "1"}}}, namespace)
        events = await collect(self.watch(api, namespace, start, label_selector="on=1"), 3)
        assert [e.type for e in events] == ["ADDED", "DELETED", "ADDED"]

    @pytest.mark.skipif(KUBECONFIG is not None, reason="a server may send bookmarks when it likes, or none")
    async def test_bookmarks_carry_the_version_on(self, api: KubeClient, namespace: str) -> None:
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        await api.create(CONFIG_MAPS, config_map("other"), "default")
        try:
            watch = self.watch(api, namespace, start, field_selector="metadata.name=nobody")
            (bookmark,) = await collect(watch, 1, bookmarks=True)
        finally:
            await api.delete(CONFIG_MAPS, "other", "default")
        assert bookmark.type == "BOOKMARK"
        assert int(bookmark.object["metadata"]["resourceVersion"]) > int(start)


class TestOwnership:
    async def owned(self, api: KubeClient, namespace: str, **reference: object) -> Json:
        owner = await api.create(CONFIG_MAPS, config_map("owner"), namespace)
        link = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "owner",
            "uid": owner["metadata"]["uid"],
            **reference,
        }
        await api.create(CONFIG_MAPS, config_map("child", ownerReferences=[link]), namespace)
        return owner

    async def test_dependents_follow_their_owner(self, api: KubeClient, namespace: str) -> None:
        await self.owned(api, namespace)
        await api.delete(CONFIG_MAPS, "owner", namespace)
        await eventually(lambda: is_gone(api, CONFIG_MAPS, "child", namespace))

    async def test_foreground_waits_for_the_dependents(self, api: KubeClient, namespace: str) -> None:
        await self.owned(api, namespace, blockOwnerDeletion=True)
        await api.patch(CONFIG_MAPS, "child", {"metadata": {"finalizers": ["test/hold"]}}, namespace)
        await api._json("DELETE", CONFIG_MAPS.path(namespace, "owner"), body={"propagationPolicy": "Foreground"})
        held = await api.get(CONFIG_MAPS, "owner", namespace)
        assert held["metadata"]["finalizers"] == ["foregroundDeletion"]
        await api.patch(CONFIG_MAPS, "child", {"metadata": {"finalizers": None}}, namespace)
        await eventually(lambda: is_gone(api, CONFIG_MAPS, "owner", namespace))

    async def test_orphans_stay(self, api: KubeClient, namespace: str) -> None:
        await self.owned(api, namespace)
        await api._json("DELETE", CONFIG_MAPS.path(namespace, "owner"), body={"propagationPolicy": "Orphan"})
        await eventually(lambda: is_gone(api, CONFIG_MAPS, "owner", namespace))
        child = await api.get(CONFIG_MAPS, "child", namespace)
        assert not child["metadata"].get("ownerReferences")

    async def test_a_namesake_owns_nothing(self, api: KubeClient, namespace: str) -> None:
        await api.create(CONFIG_MAPS, config_map("owner"), namespace)
        stranger = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "owner",
            "uid": "11111111-2222-3333-4444-555555555555",
        }
        await api.create(CONFIG_MAPS, config_map("child", ownerReferences=[stranger]), namespace)
        await eventually(lambda: is_gone(api, CONFIG_MAPS, "child", namespace))
        assert not await is_gone(api, CONFIG_MAPS, "owner", namespace)

    async def test_a_namespace_takes_its_content_along(self, api: KubeClient, namespace: str) -> None:
        name = f"{namespace}-x"
        await api.create(NAMESPACES, {"metadata": {"name": name}})
        await api.create(CONFIG_MAPS, config_map("held", finalizers=["test/hold"]), name)
        await api.delete(NAMESPACES, name)
        found = await api.get(NAMESPACES, name)
        assert found["status"]["phase"] == "Terminating"
        with pytest.raises(ApiError, match="being terminated"):
            await api.create(CONFIG_MAPS, config_map("late"), name)
        await api.patch(CONFIG_MAPS, "held", {"metadata": {"finalizers": None}}, name)
        await eventually(lambda: is_gone(api, NAMESPACES, name), within=30)


def widget_crd() -> Json:
    schema = {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "required": ["size"],
                "x-kubernetes-validations": [
                    {"rule": "self.size <= self.limit", "message": "size must not be above limit"},
                    {"rule": "self.color == oldSelf.color", "message": "color is immutable"},
                ],
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "limit": {"type": "integer", "default": 10},
                    "color": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            },
            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    version = {
        "name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, "scale": {
            "specReplicasPath": ".spec.size", "statusReplicasPath": ".status.size"}},
    }  # fmt: skip
    names = {"plural": "widgets", "kind": "Widget", "singular": "widget", "shortNames": ["wd"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.test.tidemill.dev"},
        "spec": {"group": "test.tidemill.dev", "scope": "Namespaced", "names": names, "versions": [version]},
    }


WIDGETS = Resource("test.tidemill.dev", "v1", "widgets", "Widget")


async def creates(api: KubeClient, resource: Resource, body: Json, namespace: str) -> bool:
    """Whether the server takes objects of a custom resource: it may not yet know it, or still know it to go."""
    try:
        await api.create(resource, body, namespace)
    except NotFoundError:
        return False
    except ForbiddenError as error:
        if "terminating" not in str(error):
            raise
        return False
    return True


class TestCustomResources:
    @pytest.fixture
    async def widgets(self, api: KubeClient, namespace: str) -> AsyncIterator[str]:
        async with defined(api, widget_crd()):
            probe = {"metadata": {"name": "probe"}, "spec": {"size": 1}}
            await eventually(lambda: creates(api, WIDGETS, probe, namespace))
            await api.delete(WIDGETS, "probe", namespace)
            yield namespace

    def widget(self, **spec: object) -> Json:
        return {"apiVersion": "test.tidemill.dev/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": spec}

    async def test_defaults_and_pruning(self, api: KubeClient, widgets: str) -> None:
        made = await api.create(WIDGETS, self.widget(size=1, stray=1, free={"any": {"thing": 1}}), widgets)
        assert made["spec"] == {"size": 1, "limit": 10, "color": "red", "free": {"any": {"thing": 1}}}
        assert made["metadata"]["generation"] == 1

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ({}, r"spec.size: Required value"),
            ({"size": 0}, r"spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1"),
            ({"size": "x"}, r'must be of type integer: "?x?"?'),
            ({"size": 1, "color": "green"}, r'Unsupported value: "green": supported values: "red", "blue"'),
            ({"size": 11}, r"size must not be above limit"),
        ],
    )
    async def test_validation(self, api: KubeClient, widgets: str, spec: Json, message: str) -> None:
        with pytest.raises(InvalidError, match=message):
            await api.create(WIDGETS, self.widget(**spec), widgets)

    async def test_transition_rules(self, api: KubeClient, widgets: str) -> None:
        await api.create(WIDGETS, self.widget(size=1), widgets)
        with pytest.raises(InvalidError, match="color is immutable"):
            await api.patch(WIDGETS, "w", {"spec": {"color": "blue"}}, widgets)

    async def test_status_is_a_subresource(self, api: KubeClient, widgets: str) -> None:
        body = self.widget(size=1)
        body["status"] = {"size": 7}
        made = await api.create(WIDGETS, body, widgets)
        assert "status" not in made
        found = await api.patch(WIDGETS, "w", {"status": {"size": 7}, "spec": {"size": 5}}, widgets, sub="status")
        assert (found["status"], found["spec"]["size"]) == ({"size": 7}, 1)
        assert found["metadata"]["generation"] == 1

    async def test_scale_paths(self, api: KubeClient, widgets: str) -> None:
        await api.create(WIDGETS, self.widget(size=1), widgets)
        await api.scale(WIDGETS, "w", widgets, 3)
        assert (await api.get(WIDGETS, "w", widgets))["spec"]["size"] == 3

    async def test_strategic_merge_is_for_built_in_kinds(self, api: KubeClient, widgets: str) -> None:
        await api.create(WIDGETS, self.widget(size=1), widgets)
        with pytest.raises(ApiError) as caught:
            await api.patch(WIDGETS, "w", {"spec": {"size": 2}}, widgets, type=PatchType.STRATEGIC)
        assert caught.value.code == 415

    async def test_a_crd_that_goes_takes_its_objects_along(self, api: KubeClient, namespace: str) -> None:
        await define(api, widget_crd())
        await eventually(lambda: creates(api, WIDGETS, self.widget(size=1), namespace))
        await api.delete(CRDS, "widgets.test.tidemill.dev")

        async def unserved() -> bool:
            try:
                await api.list(WIDGETS, namespace)
            except NotFoundError:
                return True
            return False

        await eventually(unserved)


class TestVariantAutoscaling:
    VAS = Resource("llmd.ai", "v1alpha1", "variantautoscalings", "VariantAutoscaling")

    @pytest.fixture
    async def ready(self, api: KubeClient, namespace: str) -> AsyncIterator[str]:
        body = {"metadata": {"name": "va"}, "spec": {"modelID": "m"}}
        async with defined(api, variant_autoscaling_crd()):
            await eventually(lambda: creates(api, self.VAS, body, namespace))
            yield namespace

    async def test_a_custom_resource_names_its_type(self, api: KubeClient, ready: str) -> None:
        body = {"metadata": {"name": "untyped"}, "spec": {"modelID": "m"}}
        with pytest.raises(ApiError, match=r"must be of type VariantAutoscaling.*'Kind' is missing"):
            await api._json("POST", self.VAS.path(ready), body=body)

    async def test_w1_an_allocation_is_written_whole(self, api: KubeClient, ready: str) -> None:
        partial = {"status": {"desiredOptimizedAlloc": {"numReplicas": 2}}}
        with pytest.raises(InvalidError, match="accelerator and numReplicas are written together"):
            await api.patch(self.VAS, "va", partial, ready, sub="status")
        whole = {"status": {"desiredOptimizedAlloc": {"numReplicas": 2, "accelerator": "A100"}}}
        await api.patch(self.VAS, "va", whole, ready, sub="status")

    async def test_an_empty_allocation_is_kept(self, api: KubeClient, ready: str) -> None:
        found = await api.patch(self.VAS, "va", {"status": {"desiredOptimizedAlloc": {}}}, ready, sub="status")
        assert found["status"]["desiredOptimizedAlloc"] == {}

    async def test_cost_and_kind_are_checked(self, api: KubeClient, ready: str) -> None:
        with pytest.raises(InvalidError, match=r"spec.variantCost in body should match"):
            await api.patch(self.VAS, "va", {"spec": {"variantCost": "abc"}}, ready)
        with pytest.raises(InvalidError, match=r'Unsupported value: "StatefulSet"'):
            await api.patch(self.VAS, "va", {"spec": {"scaleTargetRef": {"kind": "StatefulSet"}}}, ready)
        with pytest.raises(InvalidError, match="minReplicas must not be above maxReplicas"):
            await api.patch(self.VAS, "va", {"spec": {"minReplicas": 3, "maxReplicas": 2}}, ready)


class TestEventsAndPods:
    async def test_events_are_found_by_what_they_are_about(self, api: KubeClient, namespace: str) -> None:
        events = Resource("", "v1", "events", "Event")
        for kind in ("Pod", "ServiceMonitor"):
            body = {
                "metadata": {"name": kind.lower()},
                "involvedObject": {"kind": kind, "name": "x", "namespace": namespace},
                "reason": "R", "message": "m", "type": "Warning",
            }  # fmt: skip
            await api.create(events, body, namespace)
        page = await api.list(events, namespace, field_selector="involvedObject.kind=ServiceMonitor")
        assert [i["metadata"]["name"] for i in page.items] == ["servicemonitor"]

    async def test_a_pod_on_no_node_is_deleted_at_once(self, api: KubeClient, namespace: str) -> None:
        body = {"metadata": {"name": "p"}, "spec": {
            "containers": [{"name": "c", "image": "none"}], "nodeSelector": {"no": "such"}}}  # fmt: skip
        await api.create(PODS, body, namespace)
        assert await api.delete(PODS, "p", namespace)
        with pytest.raises(NotFoundError):
            await api.get(PODS, "p", namespace)

    async def test_replica_sets_are_scaled_alike(self, api: KubeClient, namespace: str) -> None:
        body = {**deployment("r", 0), "kind": "ReplicaSet"}
        await api.create(REPLICA_SETS, body, namespace)
        await api.patch(REPLICA_SETS, "r", {"spec": {"replicas": 0}}, namespace, sub="scale")
        assert (await api.get(REPLICA_SETS, "r", namespace))["spec"]["replicas"] == 0
