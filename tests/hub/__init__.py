"""A hub on loopback: it serves model repositories to the real huggingface_hub client, and misbehaves on command.

::

    cut = Planned(Part.CDN, "a.safetensors", Fault(Kind.CUT, at=1000))  # its request 0 breaks off after 1000 bytes
    with HubServer(FaultSchedule((cut,)), url_uses=3) as hub:
        repository = hub.add("org/name", {"config.json": b"{}", "a.safetensors": bytes(5000)})  # or a folder
        commit = repository.commit({"config.json": b'{"a": 1}'})  # moves main, also while the server is in use
        fetch(hub.endpoint, "org/name", revision=commit.sha)
        assert [one.range_start for one in hub.of("a.safetensors", Part.CDN)] == [None, 1000]
        assert not any(one.had_authorization for one in hub.requests if one.part is Part.CDN)
        hub.set_faults(FaultSchedule.random(7, {"config.json": 8, "a.safetensors": 5000}, refusals=False))
    # schedule.final: success is impossible; schedule.discouraging: giving up is right, too; neither: it must succeed
"""

from tests.hub.faults import Fault, FaultSchedule, Kind, Part, Planned
from tests.hub.repositories import RepoFile, Repository
from tests.hub.server import HubServer, Request

__all__ = ["Fault", "FaultSchedule", "HubServer", "Kind", "Part", "Planned", "RepoFile", "Repository", "Request"]
