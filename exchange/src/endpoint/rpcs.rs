//! The part of an endpoint that gRPC's messages need: see [`crate::grpc`].

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Poll, Waker};

use bytes::Bytes;
use pleach_transport::clock;

use super::Endpoint;
use super::core::Accepted;
use super::link::{Arrived, ReceiveSlot};
use super::metrics::InlineReason;
use super::shared::DropNote;
pub(crate) use super::shared::OverRpc;
use super::tensor::{ReceivedTensor, SharedTensor};
use crate::gathered::{Field, RegisteredPart};
use crate::reference::{LinkId, Reference};

/// Why a field by reference has no bytes.
#[derive(Clone, Debug)]
pub(crate) enum FieldError {
    /// Its sender is lost, or this program cannot receive it.
    Lost(String),
    /// The reference is wrong: forged, stale or out of range.
    Wrong(String),
}

impl FieldError {
    pub(crate) fn wrong(error: impl fmt::Display) -> Self {
        Self::Wrong(error.to_string())
    }
}

/// A field by reference that was accepted.
pub(crate) enum AcceptedField {
    /// Its bytes are mapped.
    Here(ReceivedTensor),
    /// Its bytes are got.
    Coming(PendingField),
}

/// A field by reference whose bytes are on their way.
pub(crate) struct PendingField {
    endpoint: Endpoint,
    /// The number of its link.
    link: u64,
    slot: ReceiveSlot,
}

impl PendingField {
    /// The bytes, or that `waker` is woken when it is known.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<ReceivedTensor, FieldError>> {
        let waker = waker.clone();
        if !self.slot.has_ended() {
            self.slot.call_at_end(Box::new(move || waker.wake()));
        }
        let Some(result) = self.slot.take() else { return Poll::Pending };
        let tensor = result.map(Arrived::take).map_err(|error| FieldError::Lost(error.to_string()));
        // A lease whose bytes were copied is back now, and its owner is told.
        self.endpoint.handle.shared.core().leases_returned(clock::now(), self.link);
        Poll::Ready(tensor)
    }
}

impl Drop for PendingField {
    fn drop(&mut self) {
        // Its bytes may have come since the last poll. Where they come later, the core sees that
        // nobody waits.
        if let Some(result) = self.slot.leave() {
            drop(result);
            self.endpoint.handle.shared.dropped(DropNote::Leases(self.link));
        }
    }
}

/// Whether memory is lent for an RPC: not yet, from its first field on, and never again.
///
/// **Invariant:** an RPC that is over lends nothing, and begins no more.
#[derive(Default)]
pub(crate) struct RpcLends(AtomicU8);

impl RpcLends {
    const BEGUN: u8 = 1;
    const OVER: u8 = 2;

    /// A field is about to be lent. `begin`: what the first one does, which may refuse. Called
    /// under the lock of the core.
    fn begin(&self, begin: impl FnOnce() -> Result<(), InlineReason>) -> Result<(), InlineReason> {
        // Both orders pair with the swap in `end`: whoever ends the RPC then takes the lock of the
        // core, and so comes after what is done under it here.
        match self.0.compare_exchange(0, Self::BEGUN, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => begin(),
            Err(Self::BEGUN) => Ok(()),
            Err(_) => Err(InlineReason::CallOver),
        }
    }

    /// The RPC is over. True: memory was lent for it.
    pub(crate) fn end(&self) -> bool {
        // Both orders pair with the exchange in `begin`.
        self.0.swap(Self::OVER, Ordering::AcqRel) == Self::BEGUN
    }
}

impl Endpoint {
    /// Whether the other end of this link can read lendable memory.
    pub(crate) fn may_lend(&self, link: LinkId) -> bool {
        self.handle.shared.core().may_lend(link)
    }

    /// The tensor of bytes that lie in lendable memory of this endpoint.
    pub(crate) fn lendable(&self, bytes: Bytes) -> Option<SharedTensor> {
        SharedTensor::of_lendable(&self.handle.shared.memory, bytes)
    }

    /// Lends a field for an RPC.
    pub(crate) fn lend_for_rpc(
        &self,
        link: LinkId,
        rpc: u64,
        lends: &RpcLends,
        tensor: &SharedTensor,
    ) -> Result<(Reference, RegisteredPart), InlineReason> {
        let mut core = self.handle.shared.core();
        lends.begin(|| core.begin_rpc(link, rpc))?;
        core.lend_for_rpc(clock::now(), link, rpc, tensor)
    }

    /// A field of a message goes inline.
    pub(crate) fn field_goes_inline(&self, reason: InlineReason, bytes: usize) {
        self.handle.shared.core().field_goes_inline(reason, bytes as u64);
    }

    /// Accepts a field of a message.
    pub(crate) fn accept_for_rpc(&self, field: &Field) -> Result<AcceptedField, FieldError> {
        // Before the lock, whose wait is a part of the latency.
        let now = clock::now();
        let mut core = self.handle.shared.core();
        let accepted = core.accept_for_rpc(now, &field.reference, &field.registered);
        if let Ok(Accepted::Here(_)) = &accepted {
            core.field_is_here(clock::now().since(now));
        }
        drop(core);
        Ok(match accepted? {
            Accepted::Here(tensor) => AcceptedField::Here(tensor),
            Accepted::Coming { link, slot } => {
                AcceptedField::Coming(PendingField { endpoint: self.clone(), link, slot })
            }
        })
    }

    /// An RPC is over.
    pub(crate) fn rpc_over(&self, over: OverRpc) {
        self.handle.shared.core().rpc_over(clock::now(), over);
    }

    /// An RPC is over: for drops, which may happen under any lock.
    pub(crate) fn rpc_dropped(&self, over: OverRpc) {
        self.handle.shared.dropped(DropNote::Rpc(over));
    }

    /// Whether a peer without regions is an error.
    pub(crate) fn requires_regions(&self) -> bool {
        self.handle.shared.options.requires_regions
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::endpoint::{EndpointOptions, ExchangeFabric, Peer};
    use crate::reference::LeaseNumber;

    /// Longer than any test takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    /// A sender, a receiver, and the link between them, whose tensors are mapped.
    fn link() -> (Endpoint, Endpoint, Peer, LinkId) {
        link_by(ExchangeFabric::Shm)
    }

    fn link_by(fabric: ExchangeFabric) -> (Endpoint, Endpoint, Peer, LinkId) {
        let options = EndpointOptions { fabric, ..EndpointOptions::default() };
        let open = || Endpoint::open(&options).expect("a free port of loopback");
        let (sender, receiver) = (open(), open());
        let peer = receiver.connect(&sender.address().to_string()).expect("an address");
        peer.share_regions().expect("are on this host");
        let link = peer.link_with_regions().expect("has regions");
        while !sender.may_lend(link) {
            std::thread::yield_now();
        }
        (sender, receiver, peer, link)
    }

    fn bytes(endpoint: &Endpoint) -> Bytes {
        let mut tensor = endpoint.tensor::<u8>(&[1000]).expect("there is memory");
        tensor.fill(7);
        tensor.share().into_bytes()
    }

    fn lend(sender: &Endpoint, link: LinkId, lends: &RpcLends, bytes: &Bytes) -> Option<Field> {
        let tensor = sender.lendable(bytes.clone())?;
        let (reference, registered) = sender.lend_for_rpc(link, 1, lends, &tensor).ok()?;
        Some(Field { at: 0, reference, registered })
    }

    /// The bytes of a field that is read in place.
    fn accept(receiver: &Endpoint, field: &Field) -> ReceivedTensor {
        match receiver.accept_for_rpc(field).expect("is good") {
            AcceptedField::Here(tensor) => tensor,
            AcceptedField::Coming(_) => panic!("is mapped"),
        }
    }

    #[test]
    fn a_reference_that_is_forged_stale_or_out_of_range_is_refused_and_the_link_stays() {
        let (sender, receiver, _peer, link) = link();
        let data = bytes(&sender);
        let good = lend(&sender, link, &RpcLends::default(), &data).expect("may be lent");
        let of = |change: &dyn Fn(&mut Reference)| {
            let mut forged = good;
            change(&mut forged.reference);
            receiver.accept_for_rpc(&forged).err()
        };
        let lost = of(&|reference| reference.link = LinkId(1));
        assert!(matches!(lost, Some(FieldError::Lost(_))), "{lost:?}");
        let lease = LeaseNumber { generation: 2, ..good.reference.lease };
        for change in [
            &|reference: &mut Reference| reference.slice.len = u64::MAX,
            &|reference: &mut Reference| reference.slice.offset = 1 << 60,
            &|reference: &mut Reference| reference.slice.key.0 += 1,
            &|reference: &mut Reference| reference.lease.slot = u32::MAX,
            &move |reference: &mut Reference| reference.lease = lease,
        ] as [&dyn Fn(&mut Reference); 5]
        {
            let refused = of(change);
            assert!(matches!(refused, Some(FieldError::Wrong(_))), "{refused:?}");
        }
        assert_eq!(accept(&receiver, &good).as_bytes(), data);
        let again = receiver.accept_for_rpc(&good).err();
        assert!(matches!(again, Some(FieldError::Wrong(_))), "{again:?}");
        // The sender's own memory is no memory of the receiver.
        let own = sender.accept_for_rpc(&good).err();
        assert!(matches!(own, Some(FieldError::Lost(_))), "{own:?}");
        assert_eq!(receiver.counts().links, 1);
    }

    #[test]
    fn a_reference_that_comes_after_its_recall_is_refused() {
        let (sender, receiver, _peer, link) = link();
        let data = bytes(&sender);
        let lends = RpcLends::default();
        let late = lend(&sender, link, &lends, &data).expect("may be lent");
        receiver.rpc_over(OverRpc { rpc: 1, lends: None, recalls: false, misses: Some(link) });
        while sender.counts().leases > 0 {
            std::thread::yield_now();
        }
        let refused = receiver.accept_for_rpc(&late).err();
        assert!(matches!(refused, Some(FieldError::Wrong(_))), "{refused:?}");
        assert!(lend(&sender, link, &lends, &data).is_none(), "the RPC is over");
    }

    #[test]
    fn a_field_that_has_come_and_that_nobody_takes_goes_back() {
        let (sender, receiver, _peer, link) = link_by(ExchangeFabric::Tcp);
        let data = bytes(&sender);
        let field = lend(&sender, link, &RpcLends::default(), &data).expect("may be lent");
        let AcceptedField::Coming(pending) = receiver.accept_for_rpc(&field).expect("is good") else {
            panic!("is got");
        };
        let until = clock::now() + LONG;
        // Ended at the receiver, whose thread has nothing more to do for it.
        while !pending.slot.has_ended() || receiver.counts().copied.tensors == 0 {
            assert!(clock::now() < until, "{:?}", receiver.counts());
        }
        assert_eq!(sender.counts().leases, 1);
        // Also where the lock is held, with which the thread waits.
        let core = receiver.handle.shared.core();
        drop(pending);
        assert!(receiver.handle.shared.has_drop_notes());
        drop(core);
        while sender.counts().leases > 0 {
            assert!(clock::now() < until, "{:?}", sender.counts());
        }
    }

    #[test]
    fn what_is_lent_while_its_call_ends_comes_back_and_nothing_is_lent_after_it() {
        let (sender, _receiver, _peer, link) = link();
        let data = bytes(&sender);
        let tensor = sender.lendable(data).expect("is lendable");
        for rpc in 0..1_000 {
            let lends = RpcLends::default();
            let lent = std::thread::scope(|scope| {
                let lent = scope.spawn(|| sender.lend_for_rpc(link, rpc, &lends, &tensor).is_ok());
                if rpc % 3 == 0 {
                    std::thread::yield_now();
                }
                if lends.end() {
                    sender.rpc_over(OverRpc { rpc, lends: Some(link), recalls: true, misses: None });
                }
                lent.join().expect("does not panic")
            });
            let refused = sender.lend_for_rpc(link, rpc, &lends, &tensor).err();
            assert_eq!(refused, Some(InlineReason::CallOver), "after {lent}");
        }
        let until = clock::now() + LONG;
        while sender.counts().leases > 0 {
            assert!(clock::now() < until, "{:?}", sender.counts());
        }
    }

    #[test]
    fn only_bytes_of_this_endpoint_are_lent() {
        let (sender, receiver, _peer, link) = link();
        for other in [Bytes::from(vec![1; 100]), bytes(&receiver)] {
            assert!(sender.lendable(other).is_none());
        }
        let data = bytes(&sender);
        let part = lend(&sender, link, &RpcLends::default(), &data.slice(3..10)).expect("may be lent");
        let tensor = accept(&receiver, &part);
        assert_eq!(tensor.as_bytes(), [7; 7]);
        // It is lent as long as the receiver has it, whatever becomes of it here.
        drop(data);
        assert_eq!((sender.counts().leases, sender.counts().bytes_lent > 0), (1, true));
    }
}
