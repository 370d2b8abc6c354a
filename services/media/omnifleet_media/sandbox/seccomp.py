"""Which system calls a process gives up for good once its libraries are loaded.

A process that decodes needs memory, threads, clocks and the sockets and files that it already has. What it could do harm
with answers EPERM from then on, in all its threads: new sockets, other programs, new processes, signals to others, looking
into others, changing the file system, mounting, keys, tracing; and, for decoders, opening any file at all.
"""

from __future__ import annotations

import errno
import os

NETWORK = ("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4")
PROCESSES = (
    "execve",
    "execveat",
    "fork",
    "vfork",
    "kill",
    "tkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_open",
    "pidfd_getfd",
    "pidfd_send_signal",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "setns",
    "unshare",
)
FILES = (
    "truncate",
    "ftruncate",
    "unlink",
    "unlinkat",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "mkdir",
    "mkdirat",
    "rmdir",
    "mknod",
    "mknodat",
    "chmod",
    "fchmod",
    "fchmodat",
    "chown",
    "lchown",
    "fchown",
    "fchownat",
    "utimensat",
    "chroot",
    "pivot_root",
    "mount",
    "umount2",
    "memfd_create",
)
KERNEL = (
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "keyctl",
    "add_key",
    "request_key",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "reboot",
    "swapon",
    "swapoff",
)
OPENING = ("open", "openat", "openat2", "creat", "open_by_handle_at")
_CLONE_THREAD = 0x00010000
_WRITES = os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC


def give_up(*, opening: bool) -> str:
    """Install the filter in all threads of this process. opening: also opening files for reading.

    Answers "" or, where the kernel or libseccomp does not offer it, why not; rlimits then stand alone.
    """
    try:
        import pyseccomp as seccomp
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # without libseccomp.so its import fails in these ways
        return str(error) or "pyseccomp is not installed"
    denied = seccomp.ERRNO(errno.EPERM)
    try:
        rules = seccomp.SyscallFilter(seccomp.ALLOW)
        rules.set_attr(seccomp.Attr.CTL_TSYNC, 1)
        for name in (*NETWORK, *PROCESSES, *FILES, *KERNEL, *(OPENING if opening else ())):
            _add(rules, denied, name)
        if not opening:
            for flag in _WRITES:
                _add(rules, denied, "openat", seccomp.Arg(2, seccomp.MASKED_EQ, flag, flag))
                _add(rules, denied, "open", seccomp.Arg(1, seccomp.MASKED_EQ, flag, flag))
            _add(rules, denied, "openat2")
            _add(rules, denied, "creat")
        # Threads are needed, processes are not. clone3 hides its flags in memory: glibc then takes clone.
        _add(rules, denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, 0))
        _add(rules, seccomp.ERRNO(errno.ENOSYS), "clone3")
        rules.load()
    except (OSError, RuntimeError, ValueError) as error:
        return f"the kernel refuses a filter: {error}"
    return ""


def _add(rules: object, action: int, name: str, *arguments: object) -> None:
    """One rule; a call that this architecture or libseccomp does not have needs none."""
    try:
        rules.add_rule(action, name, *arguments)  # type: ignore[attr-defined]
    except (ValueError, OSError, RuntimeError) as error:
        if not _unknown_call(name):
            raise OSError(f"no rule for {name}: {error}") from error


def _unknown_call(name: str) -> bool:
    import pyseccomp as seccomp

    try:
        return int(seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)) < 0
    except (ValueError, OSError, RuntimeError):
        return True
