"""Every setting of the worker: one table, from which flags, variables, checks and the page are made.

A setting ``max_queue_seconds`` is the flag ``--max-queue-seconds`` and the variable
``ENCODEPOOL_MAX_QUEUE_SECONDS``; the flag wins. Nothing here reads the environment: whoever starts
a process hands it in. ``python -m encodepool_worker.settings`` prints docs/settings.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .errors import ConfigError
from .settings_reference import REFERENCE_VARIABLES, REFERENCE_WITHOUT_MEANING, TRUTH, WORDS_OF_TRUTH
from .settings_table import ENV_PREFIX, Setting, Value, flag_name, rows_of, setting

MIB = 1024 * 1024

GROUPS = {
    "model": "Model",
    "network": "Network",
    "limits": "Batches and limits",
    "store": "Store",
    "transfer": "Transfer",
    "life": "Times of a room and of the worker",
    "identity": "Identity and log",
    "internal": "Set by the supervisor for its children",
}


def _port(default: int, text: str) -> Any:
    return setting(default, "network", text, minimum=0, maximum=65535)


def _seconds(default: float, group: str, text: str) -> Any:
    return setting(default, group, text, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one worker was told. Every value is inside its range; raises ConfigError otherwise."""

    model: str = setting(
        "", "model", "Folder of the checkpoint, or its name in the hub cache.", metavar="DIR|NAME"
    )
    model_revision: str = setting("", "model", "Revision of a checkpoint in the hub cache.")
    served_model_name: str = setting(
        "", "model", "Name the gateway knows the model by. Empty: the last part of the model's path."
    )
    load_format: str = setting(
        "auto",
        "model",
        "auto reads the weights; dummy makes them from the seed, for tests and sizing.",
        choices=("auto", "dummy"),
    )
    seed: int = setting(0, "model", "Seed of dummy weights.", minimum=0)
    dtype: str = setting(
        "auto",
        "model",
        "Type of the weights and of the rows. auto: as the checkpoint says.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting(
        "auto", "model", "auto takes a GPU if there is one.", choices=("auto", "cpu", "cuda")
    )
    encoder_cuda_graphs: str = setting(
        "false",
        "model",
        "Record the tower once per token budget and replay it: for a GPU, one rank and 16-bit types; "
        "elsewhere it has no effect, and the log says why.",
        choices=TRUTH,
    )

    host: str = setting(
        "127.0.0.1",
        "network",
        "Address that is bound and that receivers are told: the pod's IP.",
        metavar="IP",
    )
    grpc_port: int = _port(50051, "Port of the Encode service. 0: any free one, printed in the log.")
    bootstrap_port: int = _port(8998, "Port where prefill workers ask for the ranks (HTTP).")
    metrics_port: int = _port(0, "Port of /livez, /readyz and /metrics. 0: any free one, printed in the log.")
    dist_init_port: int = _port(0, "Port where the ranks of a group meet; used above tensor_parallel_size 1.")
    dist_init_host: str = setting(
        "",
        "network",
        "Where the other pods find rank 0, which listens on its own host. Empty: host.",
        metavar="HOST",
    )
    tensor_parallel_size: int = setting(
        1,
        "network",
        "Ranks of the group: processes that compute one tower together.",
        minimum=1,
        maximum=1024,
    )
    ranks_per_pod: int = setting(
        0, "network", "Ranks that this worker runs; divides tensor_parallel_size. 0: all of them.", minimum=0
    )
    pod_index: int = setting(
        0,
        "network",
        "Which of the group's workers this is: it runs the ranks from pod_index * ranks_per_pod on.",
        minimum=0,
    )
    data_parallel_size: int = setting(1, "network", "Only 1: raise the pool's replicas instead.", minimum=1)

    max_tokens_per_batch: int = setting(
        8192,
        "limits",
        "Tokens of one tower batch; a larger item runs alone. 8192 is also the reference's default.",
        minimum=1,
    )
    max_items_per_batch: int = setting(
        160, "limits", "Items of one tower batch. 160 is also the reference's default.", minimum=1
    )
    max_queue_seconds: float = _seconds(
        60.0, "limits", "Predicted wait above which requests are refused (RESOURCE_EXHAUSTED)."
    )
    max_queue_tokens: int = setting(65536, "limits", "Tokens that may wait for the tower.", minimum=1)
    max_pixel_mib: int = setting(
        1024,
        "limits",
        "Pixels held at any time, over all connections of all gateways. A message: 256 MiB, a third at most.",
        minimum=1,
    )

    store_device_mib: int = setting(
        4096,
        "store",
        "Memory of the store on the device, where rows are put. The reference's cache has the same default.",
        minimum=0,
    )
    store_host_mib: int = setting(
        0,
        "store",
        "Memory on the host (pinned) for rows that have to leave the device; they are sent from there. "
        "On a CPU, or with an engine that cannot read the device's memory, both sizes make one store "
        "on the host.",
        minimum=0,
    )

    transfer_backend: str = setting(
        "mooncake", "transfer", "Engine that writes to the receivers.", choices=("mooncake", "tcp")
    )
    transfer_protocol: str = setting(
        "tcp", "transfer", "Protocol of the mooncake engine.", choices=("tcp", "rdma")
    )
    ib_devices: str = setting("", "transfer", "RDMA devices, separated by commas. Empty: the engine chooses.")
    transfer_timeout_seconds: float = _seconds(
        5.0, "transfer", "Time without progress after which a write has failed."
    )
    quarantine_seconds: float = _seconds(
        10.0,
        "transfer",
        "Least time that memory of a timed-out write stays as it is; at least twice the transfer timeout.",
    )

    park_seconds: float = _seconds(
        120.0, "life", "How long rows wait for receivers that have not spoken. As the reference."
    )
    announce_seconds: float = _seconds(60.0, "life", "How long receivers wait for a request.")
    tombstone_seconds: float = _seconds(
        330.0, "life", "How long a finished room is remembered; prefill workers wait 300 s."
    )
    max_tombstones: int = setting(65536, "life", "Finished rooms remembered at most.", minimum=1)
    drain_seconds: float = _seconds(
        60.0, "life", "Time to finish accepted work after SIGTERM; the rest is told Failed."
    )

    pool: str = setting("", "identity", "Name of the pool.")
    group: int = setting(0, "identity", "Number of the group in the pool.", minimum=0)
    incarnation: int = setting(0, "identity", "Number of this start in the pool.", minimum=0)
    log_level: str = setting(
        "info", "identity", "Least level that is logged.", choices=("debug", "info", "warning", "error")
    )
    termination_log: str = setting(
        "",
        "identity",
        "File for the reason of a failure. Empty: /dev/termination-log where it exists.",
        metavar="FILE",
    )
    state_dir: str = setting(
        "", "identity", "Folder of a local pool; process ids are written below it.", metavar="DIR"
    )

    run_dir: str = setting("", "internal", "Folder of the sockets between the processes.", metavar="DIR")
    rank: int = setting(0, "internal", "Rank of a loop process.", minimum=0)
    lifeline_fd: int = setting(-1, "internal", "Pipe whose end of file means: exit.", minimum=-1)
    heartbeat_fd: int = setting(-1, "internal", "Pipe for one byte a second.", minimum=-1)

    def __post_init__(self) -> None:
        problems = [text for row in TABLE for text in row.problems(getattr(self, row.name))]
        problems += _together(self)
        if problems:
            raise ConfigError(problems)

    @property
    def pod_ranks(self) -> int:
        """How many ranks this worker runs."""
        return self.ranks_per_pod or self.tensor_parallel_size

    @property
    def n_pods(self) -> int:
        return self.tensor_parallel_size // self.pod_ranks

    @property
    def own_ranks(self) -> range:
        """The ranks that this worker runs."""
        return range(self.pod_index * self.pod_ranks, (self.pod_index + 1) * self.pod_ranks)

    @property
    def wind_down_s(self) -> float:
        """How long after a drain's time its last write may keep it up: until it has timed out and rested."""
        return self.transfer_timeout_seconds + self.quarantine_seconds

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def max_pixel_bytes(self) -> int:
        return self.max_pixel_mib * MIB

    @property
    def store_device_bytes(self) -> int:
        return self.store_device_mib * MIB

    @property
    def store_host_bytes(self) -> int:
        return self.store_host_mib * MIB

    @classmethod
    def from_mapping(
        cls, flags: Mapping[str, Value | None], environ: Mapping[str, str] = MappingProxyType({})
    ) -> "Settings":
        """Settings of a worker that serves; ``flags`` are by name, None is "not given".

        Raises ConfigError with every problem there is.
        """
        problems = [
            f"{flag_name(name)} is not a setting; see --help" for name in flags if name not in BY_NAME
        ]
        values: dict[str, Value] = {}
        for row in TABLE:
            given, source = _given(row, flags, environ)
            if given is None:
                continue
            try:
                value = row.parse(given)
            except ValueError:
                problems.append(f"{source}: {given!r} is not {row.kind}")
                continue
            found = [f"{text} (from {source})" for text in row.problems(value)]
            problems += found
            if not found:
                values[row.name] = value
        settings: Settings | None = None
        try:
            settings = cls(**values)  # type: ignore[arg-type]
        except ConfigError as error:
            problems += error.problems
        problems += _incomplete(flags, environ, settings)
        if problems or settings is None:
            raise ConfigError(problems)
        return settings

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> "Settings":
        """What ``to_argv`` wrote; the environment plays no part. Raises ConfigError."""
        flags: dict[str, Value | None] = {}
        problems = []
        rest = list(argv)
        while rest:
            token = rest.pop(0)
            name, equals, value = token.removeprefix("--").partition("=")
            if not token.startswith("--"):
                problems.append(f"{token!r} is not a flag; flags look like --model DIR")
            elif equals:
                flags[name.replace("-", "_")] = value
            elif rest:
                flags[name.replace("-", "_")] = rest.pop(0)
            else:
                problems.append(f"{token} needs a value")
        if problems:
            raise ConfigError(problems)
        return cls.from_mapping(flags)

    def to_argv(self) -> list[str]:
        """Flags that make the same settings again; defaults are left out."""
        argv: list[str] = []
        for row in TABLE:
            value = getattr(self, row.name)
            if value != row.default:
                argv += [row.flag, str(value)]
        return argv


TABLE: tuple[Setting, ...] = rows_of(Settings)
BY_NAME: Mapping[str, Setting] = MappingProxyType({row.name: row for row in TABLE})


def notes(flags: Mapping[str, Value | None], environ: Mapping[str, str]) -> list[str]:
    """Sentences for the log about variables that were read under another name, or not at all."""
    out = []
    for variable, name in REFERENCE_VARIABLES.items():
        if variable not in environ:
            continue
        row = BY_NAME[name]
        if flags.get(name) is not None or row.variable in environ:
            out.append(f"{variable} is ignored: {name} is set as well")
        else:
            out.append(f"{variable} is read as {row.variable}")
    out += [f"{v} has no effect: {why}" for v, why in REFERENCE_WITHOUT_MEANING.items() if v in environ]
    known = {row.variable for row in TABLE}
    # Kubernetes makes <SERVICE>_PORT and <SERVICE>_SERVICE_* of every Service, so of a pool that is
    # itself called encodepool; hence a note, not an error.
    out += [
        f"{variable} is not a setting and has no effect"
        for variable in sorted(environ)
        if variable.startswith(ENV_PREFIX) and variable not in known
    ]
    return out


def settings_page() -> str:
    """docs/settings.md."""
    out = [
        "# Settings of the worker",
        "",
        "Made from the table in `worker/encodepool_worker/settings.py` by",
        "`python -m encodepool_worker.settings`; a test compares the two.",
        "",
        "Every setting is a flag of `encodepool-worker serve` and a variable; the flag wins. All",
        "problems of a configuration are reported at once.",
    ]
    for group, title in GROUPS.items():
        out += ["", f"## {title}", "", "| flag | variable | default | meaning |", "|---|---|---|---|"]
        for row in TABLE:
            if row.group == group:
                default = f"`{row.default}`" if row.default != "" else ""
                choices = f" One of {', '.join(f'`{c}`' for c in row.choices)}." if row.choices else ""
                out.append(f"| `{row.flag}` | `{row.variable}` | {default} | {row.help}{choices} |")
    out += ["", "## Variables of TokenSpeed", "", "Read as well, with a note in the log; ours win.", ""]
    out += ["| variable | read as |", "|---|---|"]
    out += [f"| `{variable}` | `{BY_NAME[name].flag}` |" for variable, name in REFERENCE_VARIABLES.items()]
    out += [f"| `{variable}` | no effect: {why} |" for variable, why in REFERENCE_WITHOUT_MEANING.items()]
    return "\n".join(out) + "\n"


def _given(
    row: Setting, flags: Mapping[str, Value | None], environ: Mapping[str, str]
) -> tuple[Value | None, str]:
    """The value someone gave and where it came from; (None, "") if nobody did."""
    flag = flags.get(row.name)
    if flag is not None:
        return flag, row.flag
    for variable in (row.variable, *(v for v, name in REFERENCE_VARIABLES.items() if name == row.name)):
        # An empty variable counts as not set: manifests often leave it so.
        if environ.get(variable):
            value = environ[variable]
            if row.choices == TRUTH:
                value = WORDS_OF_TRUTH.get(value.strip().lower(), value)
            return value, variable
    return None, ""


def _together(s: Settings) -> list[str]:
    """Rules between values that are each in range."""
    out = []
    if s.data_parallel_size > 1:
        out.append(
            f"data_parallel_size is {s.data_parallel_size}, but a worker holds one copy of the tower: "
            "raise replicas of the pool instead"
        )
    if s.tensor_parallel_size % s.pod_ranks:
        out.append(
            f"ranks_per_pod ({s.ranks_per_pod}) must divide tensor_parallel_size ({s.tensor_parallel_size})"
        )
    elif s.pod_index >= s.n_pods:
        out.append(f"pod_index is {s.pod_index}, but the group has {s.n_pods} pods")
    if s.rank >= s.tensor_parallel_size:
        out.append(f"rank must be below tensor_parallel_size ({s.tensor_parallel_size}), is {s.rank}")
    if s.store_device_mib + s.store_host_mib == 0:
        out.append("store_device_mib and store_host_mib are both 0: give the store some memory")
    if s.quarantine_seconds < 2 * s.transfer_timeout_seconds:
        out.append(
            f"quarantine_seconds ({s.quarantine_seconds:g}) must be at least twice "
            f"transfer_timeout_seconds ({s.transfer_timeout_seconds:g})"
        )
    if s.max_queue_tokens < s.max_tokens_per_batch:
        out.append(
            f"max_queue_tokens ({s.max_queue_tokens}) must be at least "
            f"max_tokens_per_batch ({s.max_tokens_per_batch})"
        )
    if s.transfer_protocol == "rdma" and s.transfer_backend != "mooncake":
        out.append("transfer_protocol rdma needs transfer_backend mooncake")
    if s.host in ("", "0.0.0.0", "::", "[::]", "*"):
        out.append(
            f"host is {s.host!r}, which receivers cannot connect to: give the address of this machine or pod"
        )
    elif any(c in s.host for c in ",/[] \t"):
        out.append(f"host must be one bare address or name, is {s.host!r}")
    ports = ("grpc_port", "bootstrap_port", "metrics_port", "dist_init_port")
    for i, first in enumerate(ports):
        for second in ports[i + 1 :]:
            if getattr(s, first) and getattr(s, first) == getattr(s, second):
                out.append(f"{first} and {second} are both {getattr(s, first)}: choose two ports")
    return out


def _incomplete(
    flags: Mapping[str, Value | None], environ: Mapping[str, str], settings: Settings | None
) -> list[str]:
    """What a worker that serves needs beyond values in range."""
    out = []
    if not _given(BY_NAME["model"], flags, environ)[0]:
        out.append("model is missing: give --model DIR or set ENCODEPOOL_MODEL")
    if settings is not None and settings.bootstrap_port == 0:
        out.append("bootstrap_port is 0, but prefill workers must know it: choose a port")
    if settings is not None and settings.tensor_parallel_size > 1 and settings.dist_init_port == 0:
        out.append("dist_init_port is 0, but the ranks must know where to meet: choose a port")
    return out


if __name__ == "__main__":
    print(settings_page(), end="")
