"""A fake AWS: moto's server on this machine, with additions and with faults on demand.

moto has instances, tags, subnets, security groups and types of machines. This module adds client tokens (moto launches
twice), machines that are pending and get their public address some listings later, the images' SSM parameters, spot
prices by zone, the price list, a service that returns the caller's address, and failures. It also adds sessions of
Session Manager with `agents`: the address of each machine's port 22 as a URL, once its agent has registered. Only one
fake at a time is possible, because moto's state belongs to the process.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

from moto.backends import get_backend
from moto.ec2 import ec2_backends
from moto.ec2.models import elastic_network_interfaces, instances
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.providers.fake_fleet import FakeFleets
from tests.providers.fake_images import FakeImages

ACCOUNT = "123456789012"
OUR_ADDRESS = "203.0.113.7"
SESSION_TOKEN = "AAEAAfJ3SESSIONTOKENEXAMPLE"
XML = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
PAGE = 2

IMAGES = {
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": "ami-0d1a00000000000x8",
    "/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": "ami-0d1a0000000000a64",
    "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id": "ami-0e0700000000000x8",
    "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id": "ami-0b0700000000000x8",
    "/aws/service/canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id": "ami-0b0700000000000a4",
}
SNAPSHOT_GB = {
    "ami-0d1a00000000000x8": 75,
    "ami-0d1a0000000000a64": 75,
    "ami-0e0700000000000x8": 120,
    "ami-0b0700000000000x8": 8,
    "ami-0b0700000000000a4": 8,
}

REFUSALS = {
    "ec2": ("AuthFailure", 401),
    "sts": ("InvalidClientTokenId", 403),
    "ssm": ("UnrecognizedClientException", 400),
}
MESSAGE = "AWS was not able to validate the provided access credentials"


@dataclass(frozen=True)
class AwsRequest:
    """A request: service, action, parameters and region."""

    service: str
    action: str
    parameters: dict[str, Any]
    region: str


@dataclass
class Fault:
    """A failure of the next requests of an action. Without a code and a body the connection breaks.

    With `is_done` the request takes effect before it fails.
    """

    action: str
    code: str = ""
    status: int = 400
    message: str = "injected"
    is_done: bool = False
    times: int = 1
    body: str = ""
    when: Callable[[AwsRequest], bool] = field(default=lambda _: True)


type Answer = tuple[int, str, bytes]
"""Status, content type and body."""

STATIC_ACTIONS = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings")
"""What moto answers from its own files. Each such answer is a few hundred kilobytes of XML, which moto takes long to
write; so each is written once in a process.
"""
_static_answers: dict[tuple[str, str, bytes], Answer] = {}


class FakeAWS:
    """AWS on a free port of 127.0.0.1; a context manager.

    `spot` has prices by type and zone, `list_prices` those of the price list by region and type; with None the
    credentials may not read it. `pending_listings` is how many listings show a new machine as pending, without its
    public address, and `hidden_listings` how many do not show it at all. `on_listing` is called before each listing.
    `not_enabled` are regions that the account has not enabled.
    """

    def __init__(self) -> None:
        self.requests: list[AwsRequest] = []
        self.faults: list[Fault] = []
        self.is_refusing = False
        self.is_out = False
        self.creates_left: int | None = None
        self.pending_listings = 1
        self.hidden_listings = 0
        self.spot: dict[tuple[str, str], float] = {}
        self.list_prices: dict[tuple[str, str], float] | None = {
            ("us-east-1", "g4dn.xlarge"): 0.526,
            ("us-east-1", "c7i.xlarge"): 0.1785,
        }
        self.address = OUR_ADDRESS
        self.not_enabled: set[str] = set()
        self.agents: dict[str, str] = {}
        self.images = FakeImages(SNAPSHOT_GB, self._disk_of)
        self.fleets = FakeFleets(self)
        self.on_listing: Callable[[], None] = lambda: None
        self._new_machines: dict[str, list[Any]] = {}
        self._answers: dict[str, tuple[dict[str, Any], Answer]] = {}
        self._lock = threading.RLock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        numbers = iter(range(1, 250))  # moto invents addresses that belong to other users
        # moto's own machine images: every reset of a region takes 0.1 s to make them, and no test uses them
        self._patches.enter_context(mock.patch.dict(os.environ, MOTO_EC2_LOAD_DEFAULT_AMIS="false"))
        self._patches.enter_context(
            mock.patch.object(elastic_network_interfaces, "random_public_ip", lambda: f"198.51.100.{next(numbers)}")
        )

        class Quiet(MotoRequestHandler):
            def log(self, *_: object, **__: object) -> None:
                """Log nothing."""

        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.02), name="fake-aws", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._reset()
        self._patches.close()

    @property
    def url(self) -> str:
        """Return its URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    # ── methods for tests ────────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, action: str, code: str = "", status: int = 400, **how: Any) -> None:
        """Let the next requests of an action fail."""
        with self._lock:
            self.faults.append(Fault(action, code, status, **how))

    def parameters(self, action: str) -> list[dict[str, Any]]:
        """Return the parameters of each request of an action."""
        with self._lock:
            return [request.parameters for request in self.requests if request.action == action]

    def backend(self, region: str = "us-east-1") -> Any:
        """Return moto's EC2 of a region."""
        return ec2_backends[ACCOUNT][region]

    def machine(self, machine_id: str) -> Any:
        """Return moto's machine."""
        return next(machine for machine in self._machines() if machine.id == machine_id)

    def alive(self) -> set[str]:
        """Return the ids of all billed machines."""
        with self._lock:
            return {
                machine.id for machine in self._machines() if machine._state.name not in ("terminated", "shutting-down")
            }

    def put(self, machine_id: str, state: str, code: str = "", message: str = "") -> None:
        """Set the state of a machine, with its reason."""
        with self._lock:
            machine = self.machine(machine_id)
            machine._state = instances.InstanceState(state, 0)
            machine.state_reason = instances.StateReason(message, code)
            self._new_machines.pop(machine_id, None)

    def subnet_zone(self, request: AwsRequest) -> str:
        """Return the zone of a RunInstances request."""
        return str(
            self.backend(request.region).get_subnet(request.parameters["NetworkInterface.1.SubnetId"]).availability_zone
        )

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reset(self) -> None:
        for service in ("ec2", "sts", "ssm"):
            get_backend(service).reset()

    def _machines(self) -> Iterator[Any]:
        for backend in list(ec2_backends[ACCOUNT].values()):
            for reservation in list(backend.reservations.values()):
                yield from reservation.instances

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["PATH_INFO"] == "/checkip":
            self.requests.append(AwsRequest("checkip", "checkip", {}, ""))
            return _send(start, (200, "text/plain", f"{self.address}\n".encode()))
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        region, service = scope.groups() if scope else ("", "")
        if target := environ.get("HTTP_X_AMZ_TARGET"):
            request = AwsRequest(service, target.rpartition(".")[2], json.loads(content), region)
        else:
            parameters = dict(parse_qsl(content.decode(), keep_blank_values=True))
            request = AwsRequest(service, parameters.pop("Action", ""), parameters, region)
        with self._lock:
            self.requests.append(request)
            answer = self._answer(environ, request)
        if answer is None:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("the answer is lost")
        return _send(start, answer)

    def _answer(self, environ: dict[str, Any], request: AwsRequest) -> Answer | None:
        if self.is_refusing:
            code, status = REFUSALS.get(request.service, ("UnrecognizedClientException", 400))
            return _refusal(request.service, code, status, MESSAGE)
        if request.region in self.not_enabled:
            return _refusal(
                request.service, *REFUSALS.get(request.service, ("UnrecognizedClientException", 400)), MESSAGE
            )
        if self.is_out:
            return _refusal(
                request.service, "Unavailable", 503, "The service is unavailable. Please try again shortly."
            )
        fault = next(
            (
                fault
                for fault in self.faults
                if fault.action in (request.action, "*") and fault.times and fault.when(request)
            ),
            None,
        )
        if fault is not None:
            fault.times -= 1
        answer = self._do(environ, request) if fault is None or fault.is_done else None
        if fault is not None and fault.body:
            return fault.status, "text/html", fault.body.encode()
        if fault is not None:
            return _refusal(request.service, fault.code, fault.status, fault.message) if fault.code else None
        return answer

    def _do(self, environ: dict[str, Any], request: AwsRequest) -> Answer:
        own = {
            "RunInstances": self._run_instances,
            "TerminateInstances": self._terminate,
            "DescribeInstances": self._describe_instances,
            "DescribeSpotPriceHistory": self._spot_prices,
            "GetParameter": self._parameter,
            "GetProducts": self._products,
            "DescribeRegions": self._regions,
            "StartSession": self._start_session,
            "TerminateSession": lambda _, request: _json({"SessionId": request.parameters["SessionId"]}),
        }
        if (reply := self.images.answer(request.action, request.parameters, request.region)) is not None:
            return _refusal("ec2", reply[0], 400, reply[0]) if reply[1] is None else _xml(request.action, reply[1])
        reply = self.fleets.answer(
            request.action,
            request.parameters,
            request.region,
            lambda parameters: self._run(environ, parameters, request.region),
        )
        if reply is not None:
            return _refusal("ec2", reply[0], 400, reply[0]) if reply[1] is None else _xml(request.action, reply[1])
        if request.action in own:
            return own[request.action](environ, request)
        return self._ask_moto(environ, request)

    def _ask_moto(self, environ: dict[str, Any], request: AwsRequest) -> Answer:
        head: list[Any] = []
        content = (
            json.dumps(request.parameters)
            if "HTTP_X_AMZ_TARGET" in environ
            else urlencode({"Action": request.action, **request.parameters})
        ).encode()
        key = request.region, request.service, content
        if key in _static_answers:
            return _static_answers[key]
        given = environ | {"wsgi.input": io.BytesIO(content), "CONTENT_LENGTH": str(len(content))}
        body = b"".join(
            self._moto(
                given, lambda status, headers, *_: head.extend((int(status[:3]), dict(headers).get("Content-Type", "")))
            )
        )
        answer = head[0], head[1], body
        if request.action in STATIC_ACTIONS and answer[0] == 200:
            _static_answers[key] = answer
        return answer

    def _run_instances(self, environ: dict[str, Any], request: AwsRequest) -> Answer:
        token = request.parameters["ClientToken"]
        if token in self._answers:
            parameters, answer = self._answers[token]
            return (
                answer
                if parameters == request.parameters
                else _refusal(
                    "ec2", "IdempotentParameterMismatch", 400, "The client token was used with other parameters"
                )
            )
        count, wanted = int(request.parameters["MinCount"]), request
        if self.creates_left is not None and count > self.creates_left:
            count, self.creates_left = self.creates_left, 0
            if count:
                wanted = AwsRequest(
                    "ec2",
                    "RunInstances",
                    {**request.parameters, "MinCount": str(count), "MaxCount": str(count)},
                    request.region,
                )
                self._make(environ, wanted)
            return _refusal("ec2", "InternalError", 500, "An internal error has occurred")
        answer = self._make(environ, wanted)
        if answer[0] == 200:
            self._answers[token] = (request.parameters, answer)
        return answer

    def _run(self, environ: dict[str, Any], parameters: dict[str, Any], region: str) -> list[str]:
        """Create the machines of a fleet."""
        before = {machine.id for machine in self._machines()}
        answer = self._make(environ, AwsRequest("ec2", "RunInstances", dict(parameters), region))
        assert answer[0] == 200, answer
        return [machine.id for machine in self._machines() if machine.id not in before]

    def _make(self, environ: dict[str, Any], request: AwsRequest) -> Answer:
        if (code := self.fleets.refusal_of(request.parameters, request.region)) is not None:
            return _refusal("ec2", code, 400, code)
        before = {machine.id for machine in self._machines()}
        answer = self._ask_moto(environ, request)
        self.fleets.came_up(
            request.parameters, request.region, [machine for machine in self._machines() if machine.id not in before]
        )
        for machine in self._machines():
            if machine.id not in before:
                self._new_machines[machine.id] = [
                    self.hidden_listings,
                    self.pending_listings,
                    machine.nics[0].public_ip,
                ]
                machine._state = instances.InstanceState("pending", 0)
                machine.nics[0].public_ip = None
        return answer

    def _terminate(self, environ: dict[str, Any], request: AwsRequest) -> Answer:
        """Terminate machines. moto fails if a machine is terminated twice, because its interfaces are deleted."""
        ids = [value for name, value in request.parameters.items() if name.startswith("InstanceId.")]
        ended = {machine.id for machine in self._machines() if machine._state.name == "terminated"}
        if not (left := [machine_id for machine_id in ids if machine_id not in ended]):
            return _xml("TerminateInstances", "<instancesSet/>")
        parameters = {name: value for name, value in request.parameters.items() if not name.startswith("InstanceId.")}
        return self._ask_moto(
            environ,
            AwsRequest(
                "ec2",
                request.action,
                parameters | {f"InstanceId.{n}": one for n, one in enumerate(left, 1)},
                request.region,
            ),
        )

    def _describe_instances(self, environ: dict[str, Any], request: AwsRequest) -> Answer:
        self.on_listing()
        hidden: set[str] = set()
        for machine_id, counters in list(self._new_machines.items()):
            if counters[0]:
                counters[0] -= 1
                hidden.add(machine_id)
            elif counters[1]:
                counters[1] -= 1
            else:
                machine = self.machine(machine_id)
                if machine._state.name == "pending":
                    machine._state = instances.InstanceState("running", 16)
                    machine.nics[0].public_ip = counters[2]
                del self._new_machines[machine_id]
        request = self.fleets.by_group(request)
        reservations = dict(self.backend(request.region).reservations)
        shown = {name: _without(reservation, hidden) for name, reservation in reservations.items()}
        with mock.patch.object(self.backend(request.region), "reservations", shown):
            return self._ask_moto(environ, request)

    def _disk_of(self, machine_id: str) -> tuple[str, int]:
        device = self.machine(machine_id).block_device_mapping["/dev/sda1"]
        return str(device.volume_id), int(device.size)

    def _regions(self, _: dict[str, Any], request: AwsRequest) -> Answer:
        """Return the named regions, including those that are not enabled (`AllRegions`)."""
        names = [value for name, value in request.parameters.items() if name.startswith("RegionName.")]
        assert request.parameters["AllRegions"] == "true", "without it a region that is not enabled is an error"
        items = (
            f"<item><regionName>{name}</regionName><optInStatus>{'not-opted-in' if name in self.not_enabled else 'opt-in-not-required'}</optInStatus></item>"
            for name in names
        )
        return _xml(request.action, f"<regionInfo>{''.join(items)}</regionInfo>")

    def _spot_prices(self, _: dict[str, Any], request: AwsRequest) -> Answer:
        types = {value for name, value in request.parameters.items() if name.startswith("InstanceType.")}
        entries = [
            (name, zone, price, stamp)
            for (name, zone), price in self.spot.items()
            for stamp, price in (("2026-11-21T00:00:00.000Z", price), ("2026-11-20T00:00:00.000Z", 99.0))
            if name in types
        ]
        start = int(request.parameters.get("NextToken") or 0)
        items = "".join(
            f"<item><instanceType>{name}</instanceType><productDescription>Linux/UNIX</productDescription><spotPrice>{price}</spotPrice>"
            f"<timestamp>{stamp}</timestamp><availabilityZone>{zone}</availabilityZone></item>"
            for name, zone, price, stamp in entries[start : start + PAGE]
        )
        more = start + PAGE if start + PAGE < len(entries) else ""
        return _xml(
            "DescribeSpotPriceHistory",
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{more}</nextToken>",
        )

    def _parameter(self, _: dict[str, Any], request: AwsRequest) -> Answer:
        if request.parameters["Name"] not in IMAGES:
            return _refusal("ssm", "ParameterNotFound", 400, "")
        return _json(
            {
                "Parameter": {
                    "Name": request.parameters["Name"],
                    "Type": "String",
                    "Value": IMAGES[request.parameters["Name"]],
                }
            }
        )

    def _start_session(self, _: dict[str, Any], request: AwsRequest) -> Answer:
        if (request.parameters.get("DocumentName"), request.parameters.get("Parameters")) != (
            "AWS-StartSSHSession",
            {"portNumber": ["22"]},
        ):
            return _refusal(
                "ssm", "InvalidDocument", 400, "Document with this name or these parameters does not exist."
            )
        target = request.parameters["Target"]
        if (url := self.agents.get(target)) is None:
            return _refusal("ssm", "TargetNotConnected", 400, f"{target} is not connected.")
        return _json({"SessionId": f"ann-{target}", "TokenValue": SESSION_TOKEN, "StreamUrl": url})

    def _products(self, _: dict[str, Any], request: AwsRequest) -> Answer:
        if self.list_prices is None:
            return _refusal(
                "pricing", "AccessDeniedException", 400, "User is not authorized to perform: pricing:GetProducts"
            )
        wanted = {one["Field"]: one["Value"] for one in request.parameters["Filters"]}
        products = [
            _product(name, price, place)
            for (region, name), price in self.list_prices.items()
            for place, price in (("AWS Region", price), ("AWS Local Zone", 9.0))
            if region == wanted["regionCode"] and name == wanted.get("instanceType", name)
        ]
        start = int(request.parameters.get("NextToken") or 0)
        more = {"NextToken": str(start + PAGE)} if start + PAGE < len(products) else {}
        return _json({"FormatVersion": "aws_v1", "PriceList": products[start : start + PAGE], **more})


def _product(name: str, price: float, place: str) -> str:
    def dimensions(usd: float) -> dict[str, Any]:
        return {
            "x.JRTCKXETXF": {
                "priceDimensions": {"x.JRTCKXETXF.6YS6EN2CT7": {"unit": "Hrs", "pricePerUnit": {"USD": f"{usd:.10f}"}}}
            }
        }

    attributes = {"instanceType": name, "locationType": place, "operatingSystem": "Linux"}
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": "x"},
            "terms": {"OnDemand": dimensions(price)},
        }
    )


def _without(reservation: Any, hidden: set[str]) -> Any:
    shown = copy.copy(reservation)
    shown.instances = [machine for machine in reservation.instances if machine.id not in hidden]
    return shown


def _refusal(service: str, code: str, status: int, message: str) -> Answer:
    if service in ("ssm", "pricing"):
        return status, "application/x-amz-json-1.1", json.dumps({"__type": code, "message": message}).encode()
    error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    if service == "ec2":
        return status, "text/xml", f"<Response><Errors>{error}</Errors><RequestID>r-1</RequestID></Response>".encode()
    return status, "text/xml", f"<ErrorResponse>{error}<RequestId>r-1</RequestId></ErrorResponse>".encode()


def _xml(action: str, inner: str) -> Answer:
    return 200, "text/xml", f"<{action}Response {XML}><requestId>r-1</requestId>{inner}</{action}Response>".encode()


def _json(body: object) -> Answer:
    return 200, "application/x-amz-json-1.1", json.dumps(body).encode()


def _send(start: Callable[..., Any], answer: Answer) -> Iterable[bytes]:
    status, kind, body = answer
    start(f"{status} Said", [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]
