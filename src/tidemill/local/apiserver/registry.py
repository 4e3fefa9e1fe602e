"""Rules of writing: what happens to an object between a request and the store.

Everything that changes an object goes through `Registry`, whoever asks: HTTP, garbage collection, tests.
"""

from __future__ import annotations

import datetime as dt
import secrets
import uuid
from collections.abc import Callable
from typing import Any, TypeAlias

from tidemill.kube.clock import rfc3339
from tidemill.kube.conditions import set_condition
from tidemill.local.apiserver import defaults, jsonpath, managed, rules
from tidemill.local.apiserver.kinds import CRDS, Kind, Kinds
from tidemill.local.apiserver.managed import Manager
from tidemill.local.apiserver.status import (
    Cause,
    StatusError,
    already_exists,
    bad_request,
    conflict,
    invalid,
    not_found,
    stale,
)
from tidemill.local.apiserver.store import Key, Store, copy

Json: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Json], Json]

_SYSTEM_METADATA = (
    "uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds",
    "resourceVersion", "managedFields",
)  # fmt: skip


class Registry:
    """Creates, updates and deletes objects of every kind, by the rules of the API conventions."""

    def __init__(self, store: Store, kinds: Kinds, *, now: Callable[[], dt.datetime]) -> None:
        self.store = store
        self.kinds = kinds
        self._now = now

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        obj = self.store.get(kind.collection, (namespace, name))
        if obj is None:
            raise not_found(kind.qualified, name)
        return obj

    def create(
        self, kind: Kind, namespace: str, obj: Json, *, manager: str = "unknown", dry_run: bool = False
    ) -> Json:
        obj = copy(obj)
        self._check_type(kind, obj)
        metadata = obj.setdefault("metadata", {})
        if kind.resource.namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise bad_request(
                    f"the namespace of the provided object does not match the namespace sent on the request: "
                    f"{metadata['namespace']} is not {namespace}"
                )
            self._check_namespace(kind, namespace)
        else:
            metadata.pop("namespace", None)
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(
                    kind.resource.kind,
                    kind.resource.group,
                    "",
                    [Cause("metadata.name", "Required value: name or generateName is required")],
                )
            metadata["name"] = metadata["generateName"] + "".join(
                secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5)
            )
        name = metadata["name"]
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        key: Key = (metadata.get("namespace", ""), name)
        if self.store.get(kind.collection, key) is not None:
            raise already_exists(kind.qualified, name)
        for field in _SYSTEM_METADATA:
            metadata.pop(field, None)
        if kind.custom and kind.status:
            obj.pop("status", None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = rfc3339(self._now())
        if kind.has_generation:
            metadata["generation"] = 1
        self._prepare(kind, obj, None)
        managed.record_update(None, obj, Manager(manager, "Update"), kind.lists, rfc3339(self._now()))
        if dry_run:
            return obj
        if kind is CRDS:
            self._serve(obj)
        return self.store.put(kind.collection, key, obj)

    def update(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        change: Change,
        *,
        sub: str = "",
        manager: str = "unknown",
        dry_run: bool = False,
        applied: bool = False,
    ) -> Json:
        """Replace an object by `change` of it. What the caller may not touch stays as it was."""
        old = self.get(kind, namespace, name)
        new = copy(change(copy(old)))
        self._check_type(kind, new)
        metadata, before = new.setdefault("metadata", {}), old["metadata"]
        wanted = metadata.get("resourceVersion")
        if wanted and wanted != before["resourceVersion"]:
            raise stale(kind.qualified, name)
        if metadata.get("uid") and metadata["uid"] != before["uid"]:
            raise conflict(
                kind.qualified,
                name,
                f"Precondition failed: UID in precondition: {metadata['uid']}, "
                f"UID in object meta: {before['uid']}",
            )
        if metadata.get("name", name) != name:
            raise bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        fields = metadata.get("managedFields") if applied else before.get("managedFields")
        for field in (*_SYSTEM_METADATA, "name", "namespace"):
            metadata.pop(field, None)
            if field in before:
                metadata[field] = before[field]
        if fields:
            metadata["managedFields"] = fields
        if sub == "status":
            written = {"status": new["status"]} if new.get("status") is not None else {}
            kept = {k: v for k, v in copy(old).items() if k != "status"}
            new = {**kept, **written, "metadata": {**copy(before), **metadata}}
        elif kind.status and "status" in old:
            new["status"] = copy({"v": old["status"]})["v"]
        elif kind.status:
            new.pop("status", None)
        self._prepare(kind, new, old)
        if kind.has_generation and _spec_of(kind, new) != _spec_of(kind, old):
            new["metadata"]["generation"] = before.get("generation", 0) + 1
        if not applied:
            who = Manager(manager, "Update", sub)
            managed.record_update(old, new, who, kind.lists, rfc3339(self._now()))
        if dry_run or _same(old, new):
            return old if not dry_run else new
        if kind is CRDS:
            self._serve(new)
        new = self.store.put(kind.collection, (namespace, name), new)
        self._finish_delete(kind, new)
        return new

    def apply(
        self, kind: Kind, namespace: str, name: str, config: Json, *, manager: str, force: bool, dry_run: bool,
        sub: str = "",
    ) -> tuple[Json, bool]:  # fmt: skip
        """Server-side apply; the object and whether it was created."""
        self._check_type(kind, config)
        metadata = config.setdefault("metadata", {})
        metadata.setdefault("name", name)
        if metadata.get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        who, now = Manager(manager, "Apply", sub), rfc3339(self._now())
        key: Key = (namespace, name)
        live = self.store.get(kind.collection, key)
        if live is None:
            merged = managed.apply(None, config, who, kind.lists, now, force=force)
            fields = merged["metadata"].pop("managedFields", None)
            created = self.create(kind, namespace, merged, manager=manager, dry_run=dry_run)
            # What was applied belongs to the applier alone; defaults belong to nobody.
            created["metadata"].pop("managedFields", None)
            if fields:
                created["metadata"]["managedFields"] = fields
            return created, True

        def change(old: Json) -> Json:
            merged = managed.apply(old, config, who, kind.lists, now, force=force)
            merged["metadata"]["resourceVersion"] = config["metadata"].get("resourceVersion")
            return merged

        return (
            self.update(kind, namespace, name, change, sub=sub, manager=manager, dry_run=dry_run, applied=True),
            False,
        )

    def delete(
        self, kind: Kind, namespace: str, name: str, options: Json | None = None, *, dry_run: bool = False
    ) -> tuple[Json, bool]:
        """Delete, or begin to: with finalizers or a grace period the object stays until they are done.

        Returns the object and whether it is gone.
        """
        options = options or {}
        obj = self.get(kind, namespace, name)
        metadata = obj["metadata"]
        preconditions = options.get("preconditions") or {}
        for field, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if preconditions.get(field) and preconditions[field] != metadata.get(field):
                raise conflict(
                    kind.resource.kind,
                    name,
                    f"the {word} in the precondition ({preconditions[field]}) does not match the {word} in record "
                    f"({metadata.get(field)}). The object might have been deleted and then recreated",
                )
        if dry_run:
            return obj, False
        finalizers: list[str] = list(metadata.get("finalizers") or ())
        policy = options.get("propagationPolicy") or (
            "Orphan" if options.get("orphanDependents") else "Background"
        )
        extra = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(policy)
        if extra and extra not in finalizers:
            finalizers.append(extra)
        grace = self._grace(kind, obj, options)
        namespace_content = kind.resource.kind == "Namespace" and (obj.get("spec") or {}).get("finalizers")
        if not finalizers and grace == 0 and not namespace_content:
            return self._remove(kind, (namespace, name)), True
        new = copy(obj)
        meta = new["metadata"]
        current = meta.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" not in meta or (current is not None and grace < current):
            meta["deletionTimestamp"] = rfc3339(self._now() + dt.timedelta(seconds=grace))
            meta["deletionGracePeriodSeconds"] = grace
            if "generation" in meta:
                meta["generation"] += 1
        if finalizers:
            meta["finalizers"] = finalizers
        if kind.resource.kind == "Namespace":
            new["status"] = {**(new.get("status") or {}), "phase": "Terminating"}
        if _same(obj, new):
            return obj, False
        new = self.store.put(kind.collection, (namespace, name), new)
        return new, self._finish_delete(kind, new)

    def scale_of(self, kind: Kind, obj: Json) -> Json:
        assert kind.scale is not None
        selector = jsonpath.find(kind.scale.selector, obj) if kind.scale.selector else None
        if isinstance(selector, dict):
            selector = ",".join(f"{k}={v}" for k, v in (selector.get("matchLabels") or {}).items())
        metadata = obj["metadata"]
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {
                k: metadata[k]
                for k in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
                if k in metadata
            },
            "spec": {"replicas": jsonpath.find(kind.scale.spec_replicas, obj) or 0},
            "status": {
                "replicas": jsonpath.find(kind.scale.status_replicas, obj) or 0,
                **({"selector": selector} if selector else {}),
            },
        }

    def set_scale(
        self, kind: Kind, namespace: str, name: str, change: Change, *, manager: str, dry_run: bool
    ) -> Json:
        assert kind.scale is not None
        path = kind.scale.spec_replicas.strip(".").split(".")

        def write(obj: Json) -> Json:
            scale = change(self.scale_of(kind, obj))
            replicas = (scale.get("spec") or {}).get("replicas", 0)
            if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
                raise invalid(
                    "Scale", "autoscaling", name,
                    [Cause("spec.replicas", f"Invalid value: {replicas}: must be greater than or equal to 0")],
                )  # fmt: skip
            version = (scale.get("metadata") or {}).get("resourceVersion")
            if version and version != obj["metadata"]["resourceVersion"]:
                raise stale(kind.qualified, name)
            node = obj
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = replicas
            return obj

        obj = self.update(kind, namespace, name, write, manager=manager, dry_run=dry_run)
        return self.scale_of(kind, obj)

    def _prepare(self, kind: Kind, obj: Json, old: Json | None) -> None:
        """Prune, default and validate, in place."""
        causes = rules.check_name(obj) if old is None else []
        if kind.schema is not None:
            kind.schema.prune(obj)
            kind.schema.default(obj)
            causes += kind.schema.validate(obj, old)
        else:
            defaults.apply_defaults(obj)
            causes += rules.check(obj, old)
        if causes:
            resource = kind.resource
            raise invalid(resource.kind, resource.group, obj["metadata"].get("name", ""), causes)

    def _check_type(self, kind: Kind, obj: Json) -> None:
        resource = kind.resource
        obj.setdefault("apiVersion", resource.api_version)
        obj.setdefault("kind", resource.kind)
        if (obj["apiVersion"], obj["kind"]) != (resource.api_version, resource.kind):
            raise bad_request(
                f"the API version and kind in the data ({obj['apiVersion']} {obj['kind']}) do not match the "
                f"expected API version and kind ({resource.api_version} {resource.kind})"
            )

    def _check_namespace(self, kind: Kind, namespace: str) -> None:
        found = self.store.get("namespaces", ("", namespace))
        if found is None:
            raise not_found("namespaces", namespace)
        if "deletionTimestamp" in found["metadata"]:
            raise StatusError(
                403,
                "Forbidden",
                f"{kind.qualified} is forbidden: unable to create new content in namespace {namespace} "
                "because it is being terminated",
            )

    def _grace(self, kind: Kind, obj: Json, options: Json) -> int:
        if kind.resource.kind != "Pod" or not obj["spec"].get("nodeName"):
            return 0
        if obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return 0
        asked = options.get("gracePeriodSeconds")
        return obj["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else int(asked)

    def _finish_delete(self, kind: Kind, obj: Json) -> bool:
        """Remove an object that was only waiting for its last finalizer."""
        metadata = obj["metadata"]
        waiting = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        if kind.resource.kind == "Namespace":
            waiting = waiting or (obj.get("spec") or {}).get("finalizers")
        if "deletionTimestamp" not in metadata or waiting:
            return False
        self._remove(kind, (metadata.get("namespace", ""), metadata["name"]))
        return True

    def _remove(self, kind: Kind, key: Key) -> Json:
        last = self.store.delete(kind.collection, key)
        if kind is CRDS:
            for version in [k for k in self.kinds if k.collection == _collection_of_crd(last)][:1]:
                for obj in self.store.list(version.collection):
                    metadata = obj["metadata"]
                    self.store.delete(version.collection, (metadata.get("namespace", ""), metadata["name"]))
            self.kinds.remove_crd(last)
            self.store.drop(_collection_of_crd(last))
        return last

    def _serve(self, crd: Json) -> None:
        """Serve what a CRD describes from now on. Raises StatusError 422 for one that cannot be."""
        names = crd["spec"]["names"]
        names.setdefault("singular", names["kind"].lower())
        names.setdefault("listKind", names["kind"] + "List")
        expected = f"{names['plural']}.{crd['spec']['group']}"
        if crd["metadata"]["name"] != expected:
            message = f'Invalid value: "{crd["metadata"]["name"]}": must be spec.names.plural+"."+spec.group'
            raise invalid(CRDS.resource.kind, CRDS.resource.group, crd["metadata"]["name"],
                          [Cause("metadata.name", message)])  # fmt: skip
        try:
            self.kinds.add_crd(crd)
        except ValueError as error:
            cause = Cause("spec.versions", f"Invalid value: {error}")
            raise invalid(CRDS.resource.kind, CRDS.resource.group, expected, [cause]) from None
        status = crd.setdefault("status", {})
        status["acceptedNames"] = copy(names)
        stored = [v["name"] for v in crd["spec"]["versions"] if v.get("storage")]
        status["storedVersions"] = sorted({*(status.get("storedVersions") or ()), *stored})
        conditions = status.get("conditions") or []
        now = rfc3339(self._now())
        for type_, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ):
            conditions = set_condition(
                conditions, type=type_, status=True, reason=reason, message=message, generation=None, now=now
            )
        status["conditions"] = conditions


def _collection_of_crd(crd: Json) -> str:
    return f"{crd['spec']['names']['plural']}.{crd['spec']['group']}"


def _spec_of(kind: Kind, obj: Json) -> Json:
    """What counts for the generation: all but metadata, and status where it is a subresource."""
    skipped = ("metadata", "status") if kind.status else ("metadata",)
    return {k: v for k, v in obj.items() if k not in skipped}


def _same(old: Json, new: Json) -> bool:
    def bare(obj: Json) -> Json:
        metadata = {k: v for k, v in obj["metadata"].items() if k not in ("resourceVersion", "managedFields")}
        return {**obj, "metadata": metadata}

    if bare(old) != bare(new):
        return False

    # Ownership without a change of value is a change too; a mere new time is not.
    def owners(obj: Json) -> Any:
        entries = obj["metadata"].get("managedFields") or ()
        return [{k: v for k, v in entry.items() if k != "time"} for entry in entries]

    return owners(old) == owners(new)
