//! Leases: memory of one program that another one reads in place, until its last handle is dropped.
//!
//! * The [`LeaseOwner`] lends bytes of its buffers on links. It keeps a handle of the buffer for
//!   each lease, so that the buffer is not used again.
//! * The [`LeaseHolder`] is the other end of a link. It checks each reference and makes a [`Lease`]
//!   of it. Clones of a lease are one lease.
//! * The drop of the last clone stores a number into the counter of the lease's slot
//!   ([`ReturnCounters`]), which the owner reads: how many leases of this slot are back. A slot is
//!   lent again only after that.
//! * A lease comes back *untouched* when nobody read it: its receive had been cancelled, and it was
//!   declined ([`Lease::decline`]). One bit of the counter says so ([`UNTOUCHED`]). The tensor is
//!   then for the next receiver. No message is needed that the return could overtake.
//! * A reference that never reached the holder is recalled: the holder then counts the lease as
//!   back, untouched, and refuses the reference should it come late.
//!
//! **Invariant:** the owner gives the handle of a lease back exactly once: when the counter says
//! that the lease is back, or when the link is severed. A holder accepts a lease at most once, on
//! its own link, and only bytes inside of a region that the owner announced. A counter that says
//! anything else than the owner's last lease or the one before is a violation: the link is to be
//! severed then.

/// Most slots of a link, whatever its ends ask for: the holder keeps a number for each.
pub const SLOTS_MAX: u32 = 1 << 16;

/// The bit of a counter that says that nobody read the last lease of its slot.
pub const UNTOUCHED: u64 = 1 << 63;

mod holder;
mod owner;
#[cfg(test)]
mod tests;

pub use self::holder::{
    Lease, LeaseHolder, REGIONS_MAX, ReferenceError, RegionAnnounceError, ReturnCounters,
};
pub use self::owner::{LeaseLimits, LeaseOwner, LendError, OpenLinkError, ReturnError, Returned, Unlent};
