"""One run of a test executable with a given library: how it ended, which case ended it, how long each case took."""
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import resource
import selectors
import signal
import subprocess
import threading
import time
import typing

PATIENCE = 5  # a case may take five times as long as it does unmutated, and the grace
MARK = "PLUMB_MUTANT_TRIAL"
running: dict[str, subprocess.Popen] = {}  # by their marks
interrupted = threading.Event()


@dataclasses.dataclass
class Times:
    """What each case took without a mutant; "" stands for the time before, between and after the cases."""
    cases: dict[str, float]
    grace: float = 10.0

    def limit(self, case: str) -> float:
        return PATIENCE * self.cases.get(case, 0.0) + self.grace

    def times(self, factor: float) -> "Times":
        return Times({case: factor * seconds for case, seconds in self.cases.items()}, factor * self.grace)


@dataclasses.dataclass
class Trial:
    verdict: str  # passed, failed, timed out
    case: str     # the first that failed, or during which it ended
    failed: list[str]
    times: Times
    seconds: float
    tail: str


def run(command: list[str], library: pathlib.Path, scratch: pathlib.Path, times: Times | None, memory: int,
        seconds: float = 1800) -> Trial:
    """`times` of an unmutated run bound each case; without them only `seconds` bounds the whole."""
    if interrupted.is_set():
        return Trial("failed", "", [], Times({}), 0.0, "")
    scratch.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{library.name}-{time.monotonic_ns()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(library), "TMPDIR": str(scratch),
                   MARK: mark}
    start = last = time.monotonic()
    process = subprocess.Popen(command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    running[mark] = process
    limit(process.pid, memory)
    os.set_blocking(process.stdout.fileno(), False)
    verdict, case, failed, taken, tail, rest = "passed", "", [], {}, b"", b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            end = start + seconds if times is None else last + times.limit(case)
            if now > end or interrupted.is_set():  # also one that began while everybody was told to end
                verdict = "timed out"
                break
            if not ready.select(min(end - now + 0.01, 0.5)):
                if process.poll() is not None:  # a child may hold the pipe open
                    break
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            tail = (tail + data)[-8000:]
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if found := re.match(rb"\[ RUN      \] (\S+)", line):
                    taken[""] = max(taken.get("", 0.0), time.monotonic() - last)
                    case, last = found[1].decode(), time.monotonic()
                elif found := re.match(rb"\[       OK \] |\[  SKIPPED \] |\[  FAILED  \] ", line):
                    if b"FAILED" in found[0] and case:
                        failed.append(case)
                    if case:
                        taken[case] = time.monotonic() - last
                        case, last = "", time.monotonic()
    if verdict == "passed":
        try:
            process.wait(times.limit("") if times else 60)
        except subprocess.TimeoutExpired:
            verdict = "timed out"
    end_all(process, mark)
    if verdict == "passed" and process.returncode:
        verdict = "failed"
    taken[""] = max(taken.get("", 0.0), time.monotonic() - last)
    return Trial(verdict, failed[0] if failed else case, failed, Times(taken), time.monotonic() - start,
                 tail.decode(errors="replace"))


def limit(pid: int, memory: int) -> None:
    """A mutant may ask for all memory there is; and nobody reads its core."""
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        resource.prlimit(pid, resource.RLIMIT_DATA, (memory, memory))
    except OSError:  # it has ended already
        pass


def kill_session(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def interrupt() -> None:
    """Makes every trial end now, each tidying up after itself, and no other begin."""
    interrupted.set()
    for process in list(running.values()):
        kill_session(process)


def side_by_side(jobs: int, function: typing.Callable, items: list) -> list:
    """What `function` makes of each, so many at a time. An interrupt ends all trials.

    It looks up now and then: any thread may take a signal, but its handler runs in this one, once it runs at all.
    """
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            while concurrent.futures.wait(futures, timeout=0.5).not_done:
                pass
        except KeyboardInterrupt:
            interrupt()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def end_all(process: subprocess.Popen, mark: str) -> None:
    """Ends what the trial started: its session, and whoever left that but still carries the mark."""
    kill_session(process)
    process.stdout.close()
    process.wait()
    running.pop(mark, None)
    wanted = f"{MARK}={mark}".encode()
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass
