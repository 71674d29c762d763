"""Connect the commands of a run on several machines, and compare their settings.

Machine 0 listens at `--rendezvous`, or at a port that it publishes in the store of an engine. Each other command
connects, authenticates itself and sends a `Hello`. Machine 0 refuses a command that does not fit, and waits on.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka import __version__
from duoka.errors import MISSING, AskedError, DuokaError, OptionError, TimedOut
from duoka.launchers.machines import OtherMachines
from duoka.network.connection import (
    LONGEST,
    LOST,
    TO_SEND,
    Channel,
    Connection,
    Reception,
    WrongKey,
    answer,
    challenge,
    interface_of,
    listen_on,
    reason,
)
from duoka.network.keys import Key, key_of
from duoka.planning.options import Machines
from duoka.planning.plan import Plan, joined
from duoka.script.target import sources
from duoka.system import environment
from duoka.system.messages import printable
from duoka.system.processes import machine_name

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PAUSE = 0.5  # seconds between two attempts to reach machine 0
LOOK = 0.05  # seconds between two looks at connections that are being authenticated
HELLO_TIMEOUT = 5.0  # seconds that each of them has
MOST_NAMED = 8  # machines in one message
REPORT_WAIT_AFTER = 3.0  # seconds of waiting after which a line says for whom
COMPARED = (  # settings of the plan
    *("strategy", "shares", "batch_norm", "randomness", "loading", "blocks", "checkpoint_activations", "cpu_offload"),
    *("row_independent", "timeout", "step_timeout", "restarts"),
)
WITHOUT_KEY = (
    "the machines share no key, so anybody who reaches this port can take part in the run and read what it "
    "computes; give all machines the same DUOKA_KEY or --key-file to prevent that"
)

ReportWait = Callable[[str], None]  # called again and again with a text that names whom this machine waits for


@contextmanager
def join_machines(plan: Plan, say: Callable[[str], None]) -> Iterator[tuple[Plan, str, OtherMachines]]:
    """Connect to the other machines, if there are any; yield the completed plan, a name for the run, and the others.

    say: prints a line. Raises TimedOut if a machine did not connect in time; AskedError if the machines were started
    with different settings, or cannot compute together; OptionError if machine 0 cannot listen at `--rendezvous`.
    """
    if plan.machines.count == 1:
        yield plan, secrets.token_hex(8), OtherMachines()
        return
    key = key_of(plan.machines, plan.key_file)
    if not key.is_given and plan.machines.number == 0:
        say(WITHOUT_KEY)
    settings = settings_of(plan)
    try:
        hello = hello_of(plan, key, settings)
        channel, hellos = connect(plan.machines, key, hello, plan.timeout, report_long_waits(say))
    except SettingsDiffer as error:  # each machine names its own value: values are not sent to others
        me, other = plan.machines.called(plan.machines.number), plan.machines.called(error.other)
        value = f"{settings.get(error.what, MISSING)!r} on {me} ({hello.name})"
        differs = f"{error.what} is {value}, but differs on {other}"
        raise AskedError(f"all machines must have the same settings: {differs}") from None
    with closing(channel):
        try:
            plan = replace(plan, machines=replace(plan.machines, host=channel.host))
            workers, names, hosts = zip(*((each.workers, each.name, each.host) for each in hellos), strict=True)
            plan, run = joined(plan, workers, names, hosts), hellos[0].run
            key, interface = key.derived(f"objects {run}"), interface_of(channel.address)
            yield plan, run, OtherMachines(channel, key, interface, plan.machines, plan.timeout)
        except DuokaError as error:
            channel.send(LOST, str(error))
            raise


def report_long_waits(say: Callable[[str], None]) -> ReportWait:
    """Return a function that prints its text once the same text has been passed for 3 s."""
    since, printed = dict[str, float](), set[str]()

    def report_wait(text: str) -> None:
        if time.monotonic() - since.setdefault(text, time.monotonic()) > REPORT_WAIT_AFTER and text not in printed:
            printed.add(text)
            say(text)

    return report_wait


# The first message.


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a command."""

    name: str  # host name
    machines: int  # number of machines
    each: str = "machine"  # what a command runs, the workers of a machine or one rank
    workers: int = 1  # number of its workers
    run: str = ""  # a name for the run; machine 0's is used
    host: str = ""  # digest that names the real machine
    device: str = ""  # digest of its device, if each command is one rank
    # Digests of what must be equal on all machines, by name; values themselves are not sent.
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def checked(cls, value: Any) -> Hello:
        """Check and convert a received message. Raises ValueError if it is not a hello message of duoka."""
        try:
            hello = cls(**value)
        except TypeError:
            raise ValueError("not the first message of a duoka command") from None
        settings = hello.settings if isinstance(hello.settings, dict) else {"": None}
        texts = (hello.name, hello.each, hello.run, hello.host, hello.device, *settings, *settings.values())
        are_texts = all(isinstance(text, str) and len(text) < 1024 for text in texts)
        if not are_texts or any(type(n) is not int or not 0 < n < 1 << 20 for n in (hello.machines, hello.workers)):
            raise ValueError("not the first message of a duoka command")
        return replace(hello, name=printable(hello.name, 255))


def hello_of(plan: Plan, key: Key, settings: Mapping[str, Any]) -> Hello:
    """Return the first message of this command."""
    device = plan.devices[0].uuid if plan.machines.each == "rank" else ""
    digests = {what: key.sign(b"fact", what.encode(), json.dumps(value).encode()) for what, value in settings.items()}
    return Hello(
        name=socket.gethostname(),
        machines=plan.machines.count,
        each=plan.machines.each,
        workers=plan.workers,
        run=secrets.token_hex(8),
        host=key.sign(b"host", machine_name().encode()),
        device=device and key.sign(b"device", device.encode()),
        settings=digests,
    )


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return what must be equal on all machines, by the name used in messages."""
    files = {f"the content of {source.shown}": source.digest[:12] for source in sources(plan.target)}
    return {
        "the version of duoka": __version__,
        "the version of torch": importlib.metadata.version("torch").partition("+")[0],
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "PYTHONHASHSEED": environment.variable("PYTHONHASHSEED"),
        "the script": [plan.target.name] if plan.target.is_module else [Path(plan.target.name).name],
        "the script's argument list": list(plan.target.args),
        **files,
        "the script's kind": plan.kind.value,
        **{f"--{name.replace('_', '-')}": getattr(plan, name) for name in COMPARED},
        "--rows": [plan.weights, plan.measures_rows],
        "--threads": plan.threads if plan.strategy == "exact" else None,
        "the type of the devices": plan.devices[0].type,
    }


class SettingsDiffer(AskedError):
    """Two machines were started with different settings."""

    def __init__(self, what: str, other: int, name: str) -> None:
        self.what, self.other = what, other  # the setting, and a machine with another value
        super().__init__(f"all machines must have the same settings: {what} differs on {name}")


def find_refusal(number: int, hello: Hello, accepted: Mapping[int, Hello], machines: Machines) -> AskedError | None:
    """Return the error for a command that has the key but does not fit the run; None if it fits.

    number: of its machine. accepted: messages of the commands so far, machine 0's among them. machines: machine 0's.
    """
    mine, count, each = accepted[0], machines.count, machines.each
    if hello.machines != count:
        return AskedError(f"--machines is {count} on {each} 0 ({mine.name}), but {hello.machines} on {hello.name}")
    if not 0 < number < count:
        return AskedError(f"there is no {each} {number} of {count}")
    if number in accepted:
        return AskedError(f"--machine {number} was given on two machines: {accepted[number].name} and {hello.name}")
    for what in {**mine.settings, **hello.settings}:
        if mine.settings.get(what) != hello.settings.get(what):
            return SettingsDiffer(what, number, f"{each} 0 ({mine.name}) and {each} {number} ({hello.name})")
    if not machines.engine:
        return None
    # Commands that an engine started may be on one machine, and have the same device.
    starts = f"{machines.how} starts one for each machine; --machines 1 makes each a run of its own"
    for other, earlier in accepted.items():
        both = f"process {other} and process {number} of {machines.engine}"
        if earlier.each != hello.each:
            differs = f"one on {earlier.name}, but several on {hello.name}"
            text = f"{machines.engine} must start as many processes on each machine, but has {differs}"
            return AskedError(f"{text}; {starts}")
        if earlier.host == hello.host and earlier.each == "machine":
            return AskedError(f"{both} must be on different machines, but are both on {hello.name}; {starts}")
        if earlier.host == hello.host and earlier.device and earlier.device == hello.device:
            return AskedError(f"{both} are two ranks with one device ({hello.name}); {starts}")
    return None


# The connections.


def connect(
    machines: Machines, key: Key, hello: Hello, seconds: float, report_wait: ReportWait
) -> tuple[Channel, list[Hello]]:
    """Wait up to `seconds` for all machines; return this one's channel and all first messages, in machines' order.

    Raises: as `join_machines`.
    """
    if machines.number > 0:
        return _reach_host(machines, key, hello, seconds, report_wait)
    admission = Admission(machines, key, hello)
    try:
        with _listen(machines) as listener:
            admission.wait(listener, seconds, report_wait)
        hellos = [admission.hellos[number] for number in sorted(admission.hellos)]
        channel = Channel(0, admission.connections)
    except BaseException as error:
        for connection in admission.connections.values():
            with suppress(OSError):
                if isinstance(error, AskedError):
                    connection.send("refused", 0, ["", str(error)])
            connection.socket.close()
        raise
    channel.send("accepted", [asdict(each) for each in hellos])
    return channel, hellos


class Admission:
    """Machine 0's wait for the commands of the other machines."""

    def __init__(self, machines: Machines, key: Key, hello: Hello) -> None:
        self.machines, self.key = machines, key
        self.hellos, self.connections = {0: hello}, dict[int, Connection]()  # of those accepted so far, by machine
        self._last_refusal = ""

    def wait(self, listener: socket.socket, seconds: float, report_wait: ReportWait) -> None:
        """Accept commands until all have connected.

        Raises TimedOut if a machine did not connect in time; AskedError if a command does not fit, and no other one
        can come in its place.
        """
        rendezvous, each = self.machines.rendezvous, self.machines.each
        deadline = time.monotonic() + seconds
        listener.setblocking(False)
        with Reception(listener, self._greet, HELLO_TIMEOUT) as reception, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing := [number for number in range(self.machines.count) if number not in self.hellos]:
                names = " and ".join(f"{each} {number}" for number in missing[:MOST_NAMED])
                names += f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
                report_wait(f"waiting for {names} at {rendezvous}{self._last_refusal}")
                left = deadline - time.monotonic()
                if left <= 0:
                    me, where = self.machines.called(0), f"at {rendezvous} in {seconds:g} s"
                    raise TimedOut(f"{me} gave up waiting for {names}: no connection {where}{self._last_refusal}")
                # Who is being authenticated answers to a thread, not to this selector: look for them often.
                for event, _ in selector.select(min(left, LOOK if len(reception) else PAUSE)):
                    if (connection := self.connections.get(event.data)) is not None:
                        try:  # an accepted command sends nothing: it has ended, and its machine may connect again
                            connection.receive()
                        except (OSError, ValueError):
                            selector.unregister(connection.socket)
                            connection.socket.close()
                            del self.connections[event.data], self.hellos[event.data]
                for greeting in reception.poll():
                    try:
                        number, connection, hello = greeting.result()
                    except WrongKey as error:
                        hint = "give all the same DUOKA_KEY or --key-file"
                        self._last_refusal = f"; {printable(error)}: {hint}"
                    except (OSError, ValueError, TypeError):  # somebody who is no command of duoka
                        continue
                    else:
                        self._accept(number, connection, hello, selector)

    def _greet(self, accepted: socket.socket) -> tuple[int, Connection, Hello]:
        try:
            connection = Connection(accepted)
            number = challenge(connection, self.key)
            what, again, value = connection.receive_one()
            if (what, again) != ("hello", number):
                raise ValueError("not the first message of a duoka command")
            return number, connection, Hello.checked(value)
        except BaseException:
            accepted.close()
            raise

    def _accept(self, number: int, connection: Connection, hello: Hello, selector: selectors.BaseSelector) -> None:
        refusal = find_refusal(number, hello, self.hellos, self.machines)
        if refusal is None:
            self.connections[number], self.hellos[number] = connection, hello
            selector.register(connection.socket, selectors.EVENT_READ, number)
            return
        with suppress(OSError):
            connection.send("refused", 0, [getattr(refusal, "what", ""), str(refusal)])
        connection.socket.close()
        self._last_refusal = f"; {self.machines.each} {number} ({hello.name}) connected and was refused: {refusal}"
        if self.machines.engine and self.key.is_given:  # only this job has its key: no other machine will connect
            raise refusal


def _reach_host(
    machines: Machines, key: Key, hello: Hello, seconds: float, report_wait: ReportWait
) -> tuple[Channel, list[Hello]]:
    """Connect to machine 0, as often as that fails, until it has accepted all machines."""
    rendezvous, host, why = machines.rendezvous, f"{machines.each} 0", "it did not answer"
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        report_wait(f"waiting for {host} at {rendezvous}: {why}")
        try:
            to_answer = min(left, TO_SEND)
            connection = Connection(socket.create_connection(_address_of_host(machines, to_answer), to_answer))
            try:
                connection.socket.settimeout(to_answer)  # where nobody accepts, too, no wait outlasts the deadline
                hellos = _introduce(connection, machines, key, hello, deadline, report_wait)
                return Channel(machines.number, {0: connection}), hellos
            except BaseException:
                connection.socket.close()
                raise
        except (OSError, ValueError) as error:  # mostly machine 0 has not started yet, or has started elsewhere
            why = printable(reason(error))
            time.sleep(min(left, PAUSE))
    me = machines.called(machines.number)
    raise TimedOut(f"{me} gave up waiting for {host}: it did not answer at {rendezvous} in {seconds:g} s; {why}")


def _introduce(
    connection: Connection, machines: Machines, key: Key, hello: Hello, deadline: float, report_wait: ReportWait
) -> list[Hello]:
    """Send this command's first message, and return all, once machine 0 has accepted all machines."""
    answer(connection, key, machines.number)
    connection.longest = LONGEST
    connection.send("hello", machines.number, asdict(hello))
    connection.socket.settimeout(PAUSE)
    while time.monotonic() < deadline:
        report_wait(f"waiting for the other {machines.each}s at {machines.rendezvous}")
        with suppress(TimeoutError):
            what, _, value = connection.receive_one()
            if what == "accepted":
                return [Hello.checked(each) for each in value]
            if what == "refused":
                setting, text = value
                different = SettingsDiffer(printable(setting), 0, f"{machines.each} 0")
                raise different if setting else AskedError(printable(text))  # no OSError: it would be tried again
    raise TimeoutError(f"not all {machines.each}s connected")


# The address of machine 0: that of `--rendezvous`, or one that it publishes in the store of an engine.


def _listen(machines: Machines) -> socket.socket:
    """Open the listening socket of machine 0. Raises OptionError if the port is in use."""
    if not machines.store:
        try:
            return listen_on(machines.host, machines.port)
        except OSError as error:
            free = "at a port that is free on machine 0"
            raise OptionError("--rendezvous", machines.rendezvous, free, str(error)) from None
    address = machines.host
    with suppress(OSError), socket.create_connection((machines.host, machines.port), 30.0) as connected:
        # The address from which this machine reaches the engine's store is one at which the others reach it.
        address = str(connected.getsockname()[0]).removeprefix("::ffff:")
    listener = listen_on(address, 0)
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        address = machines.host
    try:
        # `job` names this start of it, too: after a restart nobody reads the address of the start before.
        _store(machines, 60.0).set(f"duoka/{machines.job}", f"{address} {port}")
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise OptionError(
            "MASTER_ADDR and MASTER_PORT", machines.rendezvous, "where torchrun's store is", text
        ) from None
    return listener


def _address_of_host(machines: Machines, seconds: float) -> tuple[str, int]:
    """Return the address and port of machine 0, which a restart may change; raise OSError if it has none yet."""
    if not machines.store:
        return machines.host, machines.port
    with suppress(RuntimeError):  # torch's timeout
        host, _, port = _store(machines, seconds).get(f"duoka/{machines.job}").decode().rpartition(" ")
        if port.isdecimal():
            return host, int(port)
    raise ConnectionError("machine 0 has not published its address yet")


def _store(machines: Machines, seconds: float) -> Store:
    from duoka.network.rendezvous import tcp_store  # imports torch

    limit = timedelta(seconds=max(1.0, seconds))
    return tcp_store(machines.host, machines.port, is_master=False, timeout=limit)
