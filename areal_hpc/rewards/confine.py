"""System call filter and Landlock rules of the sandbox.

`seccomp_filter` makes the filter that bubblewrap installs; `confine` shuts in the
calling process where there are no namespaces. Standard library only and free of
imports from this package: the sandbox sends this module's code to its runner.
"""

import os
import platform
import struct

EPERM, ENOSYS = 1, 38
AF_UNIX = 1
CLONE_NAMESPACES = 0x7E020000
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000

# name: (x86_64, aarch64); None where an architecture has no such call.
ALWAYS_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "sethostname": (170, 161),
    "setdomainname": (171, 162), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "quotactl": (179, 60), "syslog": (103, 116), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
}  # fmt: skip
# What namespaces would keep inside: signals and limits of other processes, shared memory, file modes.
DENIED_WITHOUT_NAMESPACES = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
CLONE, CLONE3, SOCKET, PRLIMIT, CAPSET = (56, 220), (435, 435), (41, 198), (302, 261), (126, 91)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def seccomp_filter(namespaces: bool) -> bytes:
    """The filter as an array of `struct sock_filter`; b"" on an architecture without a table here."""
    if platform.machine() not in ARCHITECTURES:
        return b""
    column, audit_arch = ARCHITECTURES[platform.machine()]

    def instruction(code, value, jump_true=0, jump_false=0):
        return struct.pack("HBBI", code, jump_true, jump_false, value)

    def load(offset):
        return instruction(0x20, offset)

    def equal(value, jump_true, jump_false):
        return instruction(0x15, value, jump_true, jump_false)

    def give(action):
        return instruction(0x06, action)

    refuse = give(ERRNO | EPERM)
    program = [load(4), equal(audit_arch, 1, 0), give(KILL), load(0)]
    if column == 0:  # the x32 calls of x86_64 bear other numbers
        program += [instruction(0x35, 0x40000000, 0, 1), refuse]
    denied = dict(ALWAYS_DENIED) if namespaces else {**ALWAYS_DENIED, **DENIED_WITHOUT_NAMESPACES}
    for numbers in denied.values():
        if numbers[column] is not None:
            program += [equal(numbers[column], 0, 1), refuse]
    # glibc falls back to clone, whose flags a filter can see.
    program += [equal(CLONE3[column], 0, 1), give(ERRNO | ENOSYS)]
    program += [
        equal(CLONE[column], 0, 4),
        load(16),
        instruction(0x45, CLONE_NAMESPACES, 0, 1),
        refuse,
        give(ALLOW),
    ]
    # Own network namespace: local sockets lead nowhere else. Without one they are refused, too.
    family = AF_UNIX if namespaces else 0xFFFFFFFF
    program += [equal(SOCKET[column], 0, 4), load(16), equal(family, 1, 0), refuse, give(ALLOW)]
    if not namespaces:
        program += [equal(PRLIMIT[column], 0, 4), load(16), equal(0, 1, 0), refuse, give(ALLOW)]
    return b"".join([*program, give(ALLOW)])


def confine(readable, writable, devices):
    """Shut in the calling process: Landlock on files, TCP and signals, then the system call filter.

    `readable` folders may be read and executed from, `writable` ones be changed, `devices`
    read and written. What the kernel lacks is left out; `sandbox.protections` finds out.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    # Root keeps its files but none of its powers: raising limits, making devices.
    libc.syscall(CAPSET[ARCHITECTURES.get(platform.machine(), (0, 0))[0]],
                 ctypes.c_char_p(struct.pack("=Ii", 0x20080522, 0)), ctypes.c_char_p(bytes(24)))  # fmt: skip
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    version = libc.syscall(444, None, 0, 1)
    if version >= 1:
        _landlock(libc, version, readable, writable, devices)
    program = seccomp_filter(namespaces=False)
    if program:
        buffer = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
        libc.prctl(22, 2, ctypes.create_string_buffer(header, len(header)), 0, 0)  # PR_SET_SECCOMP


def _landlock(libc, version, readable, writable, devices):
    import ctypes

    everything = (1 << 13) - 1
    everything |= sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if version >= since)
    attributes = struct.pack("QQQ", everything, 0b11, 0b11)  # files; TCP bind, connect; sockets, signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(444, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return
    read = 0b1101  # execute, read a file, list a folder
    files_only = everything & (0b111 | 1 << 14 | 1 << 15)
    no_devices = everything & ~(1 << 6 | 1 << 11)  # making character and block devices
    for paths, rights in ((readable, read), (writable, no_devices), (devices, 0b110)):
        for path in paths:
            try:
                descriptor = os.open(path, os.O_PATH)
            except OSError:
                continue
            allowed = rights if os.path.isdir(path) else rights & files_only
            rule = struct.pack("=Qi", allowed & everything, descriptor)
            libc.syscall(445, ruleset, 1, ctypes.c_char_p(rule), 0)
            os.close(descriptor)
    libc.syscall(446, ruleset, 0)
    os.close(ruleset)
