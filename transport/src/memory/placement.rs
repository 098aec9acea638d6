//! From which memory node pages are taken, on machines that have several.
//!
//! A page is taken when it is first touched, from the node of whoever touches it. For memory that
//! is shared that is often the wrong one: a peer writes a result into a rank's output, or a signal
//! into its signal slots, before the rank itself has looked there, and from then on the rank reads
//! its own memory from afar. So the owner says where its pages are to be taken from, once, when it
//! makes the memory: such a policy belongs to the file, and holds whoever touches it.
//!
//! The node is the one that the owner's thread runs on then: keep a rank on its processors before
//! it joins, as launchers do (`pleach run`, `mpirun --bind-to numa`, `srun --cpu-bind`, `numactl`).
//! Where the node has no page left others give theirs.

use std::ffi::c_ulong;
use std::ptr::NonNull;

/// Nodes that a kernel can have.
const NODES_MAX: usize = 1024;

const WORD_BITS: usize = c_ulong::BITS as usize;

/// Asks for pages of this thread's node, in a shared mapping of ours that nobody has touched. Where
/// the system has no nodes nothing changes.
pub(crate) fn prefer_own_node(base: NonNull<u8>, bytes: usize) {
    let Some(node) = own_node().filter(|node| *node < NODES_MAX) else { return };
    let mut nodes = [0 as c_ulong; NODES_MAX / WORD_BITS];
    nodes[node / WORD_BITS] |= 1 << (node % WORD_BITS);
    // SAFETY: the mask is as long as the call says (it counts one bit more than there is), and read
    // only during the call; where pages are taken from changes no byte. A refusal leaves it to the
    // first touch.
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
    // SAFETY: two numbers to be written, and a third argument that no kernel looks at any more.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut processor, &raw mut node, nothing) };
    (result == 0).then_some(node as usize)
}

#[cfg(test)]
mod tests {
    use crate::memory::{Memory, SharedMemory};

    #[test]
    fn shared_memory_is_taken_from_its_owner_s_node_whoever_touches_it() {
        let memory = SharedMemory::new(1 << 20).expect("memory");
        let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") else {
            println!("skipped: this system tells nothing of nodes");
            return;
        };
        let address = format!("{:x} ", memory.base().as_ptr() as usize);
        let line = maps.lines().find(|line| line.starts_with(&address)).expect("it is mapped");
        let policy = line.split_whitespace().nth(1).expect("a policy");
        let node = super::own_node().expect("a system with nodes says on which one this is");
        let is_one_of_several = std::fs::read_to_string("/sys/devices/system/node/online")
            .is_ok_and(|online| online.contains(['-', ',']));
        // Between the two the thread may have moved.
        assert!(
            policy == format!("prefer:{node}") || (is_one_of_several && policy.starts_with("prefer:")),
            "{line}"
        );
        assert!(!line.contains(" N"), "nobody has touched it yet: {line}");
    }
}
