"""How many programs of a kernel fit one multiprocessor at once. Limits are those of CUDA's programming guide, "Compute
Capabilities"."""

SCHEDULERS = 4  # of a multiprocessor; a warp stays with one of them
REGISTERS = 65536 // SCHEDULERS  # of a scheduler's warps, 4 bytes each
WARPS, PROGRAMS = 64, 32  # of a multiprocessor, at most

# Bytes of shared memory of a multiprocessor, by compute capability, and what the system takes of them for each program.
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
RESERVED = 1 << 10


def programs_at_once(registers: int, shared: int, warps: int, capability: int) -> int:
    """Programs of `warps` warps, `registers` of a lane and `shared` bytes each, that run side by side."""
    of_a_warp = 32 * -(-registers // 8) * 8  # they come in eights
    by_registers = SCHEDULERS * (REGISTERS // of_a_warp) // warps
    by_memory = SHARED[capability] // (shared + RESERVED)
    return min(by_registers, by_memory, WARPS // warps, PROGRAMS)
