//! The limits of a NIC, checked before a request: an error number of the NIC names neither the
//! scarce resource nor a remedy.
//!
//! **Invariant:** [`Limits::reserve`] and [`Limits::allow`] refuse exactly the requests that exceed
//! a limit of the device; zero means no limit. The objects of this process are counted for each NIC
//! over all devices; objects of other processes show as an error of the system.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::sys;
use crate::mutex::lock;

/// A limited resource of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LimitKind {
    /// Registered memory regions (`max_mr`).
    Regions,
    /// Bytes of one memory region (`max_mr_size`).
    RegionBytes,
    /// Memory windows, one for each lease (`max_mw`).
    Windows,
    /// Queue pairs (`max_qp`).
    QueuePairs,
    /// Completion queues (`max_cq`).
    CompletionQueues,
}

impl fmt::Display for LimitKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Regions => "registered regions (max_mr)",
            Self::RegionBytes => "bytes in one registered region (max_mr_size)",
            Self::Windows => "memory windows (max_mw)",
            Self::QueuePairs => "queue pairs (max_qp)",
            Self::CompletionQueues => "completion queues (max_cq)",
        })
    }
}

impl LimitKind {
    /// The remedy when the limit is reached.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Regions => "drop some, or register fewer that are larger",
            Self::RegionBytes => "register the memory in parts",
            Self::Windows => "take leases back that are not used any more",
            Self::QueuePairs => {
                "take fewer ranks a NIC, fewer queue pairs (PLEACH_VERBS_QUEUE_PAIRS), or another fabric"
            }
            Self::CompletionQueues => "end other programs that use it, or take another fabric",
        }
    }
}

/// A limit of a NIC is reached.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("RDMA device {device} has no more than {most} {kind}, and {wanted} are asked for; {}", .kind.remedy())]
pub struct Limit {
    /// The device.
    pub device: String,
    /// The resource.
    pub kind: LimitKind,
    /// The limit.
    pub most: u64,
    /// The number that was requested.
    pub wanted: u64,
}

/// Why an object was not created.
#[derive(Debug, thiserror::Error)]
pub(super) enum CreateError {
    /// It would exceed a limit.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The NIC or the kernel refused.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl CreateError {
    /// The error as a kind of system error.
    pub(super) fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Limit(_) => io::ErrorKind::QuotaExceeded,
            Self::System(error) => error.kind(),
        }
    }
}

/// The limits of a device, and the objects of this process.
#[derive(Clone)]
pub(super) struct Limits {
    device: String,
    /// By [`LimitKind`]; zero: no limit.
    most: [u64; KINDS],
    used: Arc<Used>,
}

/// The number of kinds.
const KINDS: usize = 5;

/// The objects of this process on one device, by [`LimitKind`]. Relaxed everywhere: these counts
/// publish nothing.
#[derive(Default)]
struct Used([AtomicU64; KINDS]);

/// The count of one object; it ends when this is dropped.
pub(super) struct LimitReservation {
    used: Arc<Used>,
    kind: LimitKind,
}

impl Drop for LimitReservation {
    fn drop(&mut self) {
        // Relaxed: see `Used`.
        self.used.0[self.kind as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

/// The counts of the device of this name in this process.
fn used_of(device: &str) -> Arc<Used> {
    static DEVICES: Mutex<BTreeMap<String, Arc<Used>>> = Mutex::new(BTreeMap::new());
    let mut devices = lock(&DEVICES);
    Arc::clone(devices.entry(device.to_owned()).or_default())
}

impl Limits {
    pub(super) fn of(device: &str, told: &sys::ibv_device_attr) -> Self {
        let number = |told: i32| u64::try_from(told).unwrap_or(0);
        let mut most = [0; KINDS];
        most[LimitKind::Regions as usize] = number(told.max_mr);
        most[LimitKind::RegionBytes as usize] = told.max_mr_size;
        most[LimitKind::Windows as usize] = number(told.max_mw);
        most[LimitKind::QueuePairs as usize] = number(told.max_qp);
        most[LimitKind::CompletionQueues as usize] = number(told.max_cq);
        Self { device: device.to_owned(), most, used: used_of(device) }
    }

    /// Whether `more` objects are allowed; for bytes of a region, whether that length is.
    pub(super) fn allow(&self, kind: LimitKind, more: u64) -> Result<(), Limit> {
        let most = self.most[kind as usize];
        // Relaxed: see `Used`.
        let wanted = self.used.0[kind as usize].load(Ordering::Relaxed).saturating_add(more);
        if most > 0 && wanted > most {
            return Err(Limit { device: self.device.clone(), kind, most, wanted });
        }
        Ok(())
    }

    /// Counts one more object; the result is kept with the object.
    pub(super) fn reserve(&self, kind: LimitKind) -> Result<LimitReservation, Limit> {
        // Relaxed: see `Used`. Counted before the check, so that two threads never share the last
        // object.
        self.used.0[kind as usize].fetch_add(1, Ordering::Relaxed);
        let reservation = LimitReservation { used: Arc::clone(&self.used), kind };
        self.allow(kind, 0)?;
        Ok(reservation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limits of a device of this name with `most` of each resource.
    fn limits(device: &str, most: i32) -> Limits {
        // SAFETY: plain numbers, of which zero is one.
        let mut told: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        told.max_mr_size = u64::try_from(most).unwrap_or(0);
        (told.max_mr, told.max_mw, told.max_qp, told.max_cq) = (most, most, most, most);
        Limits::of(device, &told)
    }

    const COUNTED: [(LimitKind, &str); 4] = [
        (LimitKind::Regions, "(max_mr)"),
        (LimitKind::Windows, "(max_mw)"),
        (LimitKind::QueuePairs, "(max_qp)"),
        (LimitKind::CompletionQueues, "(max_cq)"),
    ];

    #[test]
    fn as_many_as_a_device_has_are_given_and_one_more_is_an_error_that_names_the_limit() {
        for (kind, name) in COUNTED {
            let limits = limits(name, 3);
            let mut taken: Vec<_> = (0..3).map(|_| limits.reserve(kind).expect("there are three")).collect();
            for refused in [limits.reserve(kind).err(), limits.allow(kind, 1).err()] {
                let error = refused.expect("there are only three");
                assert_eq!((error.most, error.wanted, error.kind), (3, 4, kind));
                let text = error.to_string();
                assert!(text.contains(name) && text.contains("RDMA device"), "{text}");
                assert!(text.ends_with(kind.remedy()), "what to do: {text}");
            }
            taken.pop();
            assert!(limits.reserve(kind).is_ok(), "one was given back");
        }
    }

    #[test]
    fn all_that_a_process_has_opened_of_a_device_counts() {
        let (one, other) = (limits("shared", 2), limits("shared", 2));
        let _first = one.reserve(LimitKind::QueuePairs).expect("there are two");
        let _second = other.reserve(LimitKind::QueuePairs).expect("there are two");
        assert!(one.reserve(LimitKind::QueuePairs).is_err());
        assert!(limits("another", 2).reserve(LimitKind::QueuePairs).is_ok());
    }

    #[test]
    fn a_region_is_at_most_as_long_as_the_device_takes() {
        let limits = limits("long", 4096);
        assert_eq!(limits.allow(LimitKind::RegionBytes, 4096), Ok(()));
        let error = limits.allow(LimitKind::RegionBytes, 4097).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("4096 bytes in one registered region (max_mr_size), and 4097"), "{text}");
    }

    #[test]
    fn a_device_that_tells_no_limit_has_none() {
        for told in [0, -1] {
            let limits = limits("unlimited", told);
            assert_eq!(limits.allow(LimitKind::RegionBytes, u64::MAX), Ok(()));
            for (kind, name) in COUNTED {
                assert!(limits.reserve(kind).is_ok() && limits.allow(kind, u64::MAX).is_ok(), "{name}");
            }
        }
    }
}
