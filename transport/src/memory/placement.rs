//! The NUMA node of memory, on machines that have several.
//!
//! A page is allocated when it is first accessed, on the node of that thread. For shared memory
//! this is often the wrong node: a peer writes a result or a signal before the rank itself accesses
//! the page, and from then on the rank reads its own memory from a remote node. So the owner sets
//! the node once, when it makes the memory. The policy belongs to the file and holds for every
//! process.
//!
//! The node is that of the owner's thread at that time: bind a rank to its processors before it
//! joins, as launchers do (`pleach run`, `mpirun --bind-to numa`, `srun --cpu-bind`, `numactl`).
//! When the node has no free page, other nodes supply it.

use std::ffi::c_ulong;
use std::ptr::NonNull;

/// Most nodes of a kernel.
const NODES_MAX: usize = 1024;

const WORD_BITS: usize = c_ulong::BITS as usize;

/// Sets the policy for a shared mapping of this process that was not accessed yet: pages come from
/// this thread's node if possible. Without NUMA nothing changes.
pub(crate) fn prefer_own_node(base: NonNull<u8>, bytes: usize) {
    let Some(node) = own_node().filter(|node| *node < NODES_MAX) else { return };
    let mut nodes = [0 as c_ulong; NODES_MAX / WORD_BITS];
    nodes[node / WORD_BITS] |= 1 << (node % WORD_BITS);
    // SAFETY: the mask is as long as the call says (it counts one bit more than exist), and is read
    // only during the call; the policy changes no byte. If the call fails, pages come from the node
    // of the first access.
    let _ = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            base.as_ptr(),
            bytes,
            libc::c_long::from(libc::MPOL_PREFERRED),
            nodes.as_ptr(),
            NODES_MAX + 1,
            0 as libc::c_long,
        )
    };
}

fn own_node() -> Option<usize> {
    let (mut processor, mut node) = (0u32, 0u32);
    let nothing = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: two numbers to write, and a third argument that kernels ignore.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut processor, &raw mut node, nothing) };
    (result == 0).then_some(node as usize)
}

#[cfg(test)]
mod tests {
    use crate::memory::{Memory, SharedMemory};
    use crate::skipped::skip;

    #[test]
    fn shared_memory_is_taken_from_its_owner_s_node_whoever_touches_it() {
        let memory = SharedMemory::new(1 << 20).expect("memory");
        let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") else {
            return skip("this system tells nothing of nodes");
        };
        let address = format!("{:x} ", memory.base().as_ptr() as usize);
        let line = maps.lines().find(|line| line.starts_with(&address)).expect("it is mapped");
        let policy = line.split_whitespace().nth(1).expect("a policy");
        let node = super::own_node().expect("a system with nodes says on which one this is");
        let is_one_of_several = std::fs::read_to_string("/sys/devices/system/node/online")
            .is_ok_and(|online| online.contains(['-', ',']));
        // The thread may have moved between the two calls.
        assert!(
            policy == format!("prefer:{node}") || (is_one_of_several && policy.starts_with("prefer:")),
            "{line}"
        );
        assert!(!line.contains(" N"), "nobody has touched it yet: {line}");
    }
}
