"""Two machines on one: network namespaces joined by a veth pair, own host names, own mounts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .launch import ROOT, Finished, make_environment

ADDRESSES = ("10.77.31.1", "10.77.31.2")
NAME = re.compile(r"dmhost-(\d+)-[01]")


class NotAllowedError(Exception):
    """Namespaces cannot be made here; the text says why."""


def ip(*arguments: str) -> str:
    """Run one `ip` command."""
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotAllowedError(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")
    return done.stdout


def remove_stale() -> None:
    """Remove what test runs left that were killed; others that still run keep theirs."""
    for line in ip("netns", "list").splitlines():
        match = NAME.fullmatch(line.split()[0])
        if match and not Path(f"/proc/{match.group(1)}").exists():
            ip("netns", "del", match.group())


@dataclass
class Job:
    """What runs on one machine."""

    process: subprocess.Popen[str]
    started: float

    def wait(self, timeout: float = 90) -> Finished:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout)
        return Finished(self.process.returncode, out, err, time.monotonic() - self.started)


@dataclass(frozen=True)
class Host:
    """One machine."""

    number: int
    name: str

    @property
    def interface(self) -> str:
        """Its network interface; it lies in its namespace, so the name is free."""
        return f"dmveth{self.number}"

    @contextlib.contextmanager
    def start(
        self,
        command: Sequence[object],
        *,
        mounts: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Job]:
        """Start a command here; at the end nothing of it is left.

        `mounts` are arguments of `mount`, seen by this command only.
        """
        lines = [f"printf %s {self.name} >/proc/sys/kernel/hostname"]
        lines += [f"mount {arguments}" for arguments in mounts]
        script = " && ".join([*lines, 'exec "$@"'])
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", script, "sh",
             *map(str, command)],
            env={
                **make_environment(), "GLOO_SOCKET_IFNAME": self.interface, **(environment or {})
            },
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield Job(process, time.monotonic())
        finally:
            self.kill()
            process.communicate(timeout=20)

    def kill(self) -> None:
        """Kill everything that runs here: it lost its power, but the network says so."""
        for pid in ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def unplug(self) -> None:
        """Pull the network cable: nothing arrives any more, and nobody is told."""
        ip("netns", "exec", self.name, "ip", "link", "set", self.interface, "down")


@contextlib.contextmanager
def open_hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines that reach each other and nothing else.

    Raises:
        NotAllowedError: This machine or its rights do not allow it.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        raise NotAllowedError("needs iproute2 (`ip`) and util-linux (`unshare`)")
    remove_stale()
    first, second = (Host(number, f"dmhost-{os.getpid()}-{number}") for number in (0, 1))
    try:
        for host in (first, second):
            ip("netns", "add", host.name)
        ip("link", "add", first.interface, "netns", first.name, "type", "veth",
           "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for host in (first, second):
            inside = ("netns", "exec", host.name, "ip")
            ip(*inside, "addr", "add", f"{ADDRESSES[host.number]}/24", "dev", host.interface)
            ip(*inside, "link", "set", host.interface, "up")
            ip(*inside, "link", "set", "lo", "up")
        with first.start(["mount"], mounts=["-t tmpfs none /mnt"]) as job:
            done = job.wait()
        if done.code != 0:
            raise NotAllowedError(done.stderr.strip())
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
