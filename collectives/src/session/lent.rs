//! Memory of this process that newcomers read while they heal.
//!
//! **Invariant:** it stays until no get can touch it: each newcomer to which it was lent has said
//! that it has read all, or a later epoch was entered and no pair is being drained or severed. An
//! epoch's end alone is not enough: a get that was begun before may still be on its way, and a
//! device that no longer finds the memory of a get ends the pair, or worse.

use std::sync::Mutex;

use pleach_transport::Slice;
use pleach_transport::mutex::lock;

/// See the module.
#[derive(Default)]
pub(crate) struct Lent(Mutex<Vec<(u64, Vec<Slice>)>>);

impl Lent {
    /// Lends memory in this epoch.
    pub(crate) fn lend(&self, epoch: u64, memory: Vec<Slice>) {
        lock(&self.0).push((epoch, memory));
    }

    /// All to which memory was lent in this epoch have read it.
    pub(crate) fn take_back(&self, epoch: u64) {
        lock(&self.0).retain(|(of, _)| *of != epoch);
    }

    /// This epoch was entered. `is_ending`: whether pairs are being drained or severed still.
    pub(crate) fn entered(&self, epoch: u64, is_ending: impl FnOnce() -> bool) {
        let mut lent = lock(&self.0);
        if lent.iter().any(|(of, _)| *of < epoch) && !is_ending() {
            lent.retain(|(of, _)| *of >= epoch);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pleach_transport::region::{Region, Registry};
    use pleach_transport::{HostMemory, RegionKey};

    use super::*;

    /// Is told what is let go of.
    #[derive(Default)]
    struct Released(Mutex<Vec<RegionKey>>);

    impl Registry for Released {
        fn released(&self, key: RegionKey) {
            lock(&self.0).push(key);
        }
    }

    #[test]
    fn memory_is_lent_until_its_readers_are_done_or_drained() {
        let released = Arc::new(Released::default());
        let memory = |key| {
            let registry: Arc<dyn Registry> = Arc::<Released>::clone(&released);
            vec![Region::new(HostMemory::new(8), RegionKey(key), registry).whole()]
        };
        let let_go = || lock(&released.0).iter().map(|key| key.0).collect::<Vec<_>>();
        let lent = Lent::default();
        lent.lend(3, memory(30));
        lent.lend(3, memory(31));
        lent.entered(3, || false);
        assert_eq!(let_go(), [0; 0], "it is read in this epoch");
        lent.entered(4, || true);
        assert_eq!(let_go(), [0; 0], "a pair is being drained");
        lent.lend(4, memory(40));
        lent.entered(4, || false);
        assert_eq!(let_go(), [30, 31]);
        lent.take_back(4);
        assert_eq!(let_go(), [30, 31, 40]);
        lent.entered(5, || unreachable!("nothing is lent"));
    }
}
