"""Occupancy: the number of programs of a kernel that fit one multiprocessor at once. The limits are from CUDA's programming guide,
"Compute Capabilities"."""

SCHEDULERS = 4  # per multiprocessor; a warp stays with one of them
REGISTERS = 65536 // SCHEDULERS  # per scheduler, 4 bytes each
WARPS, PROGRAMS = 64, 32  # per multiprocessor, at most

# Bytes of shared memory per multiprocessor, by compute capability, and bytes that the system reserves per program.
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
RESERVED = 1 << 10


def programs_at_once(registers: int, shared: int, warps: int, capability: int) -> int:
    """Programs that fit one multiprocessor, each with `warps` warps, `registers` registers per lane and `shared` bytes of shared
    memory. `capability` is a key of SHARED."""
    of_a_warp = 32 * -(-registers // 8) * 8  # registers are allocated in multiples of 8
    by_registers = SCHEDULERS * (REGISTERS // of_a_warp) // warps
    by_memory = SHARED[capability] // (shared + RESERVED)
    return min(by_registers, by_memory, WARPS // warps, PROGRAMS)
