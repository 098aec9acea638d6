//! References in the messages of RPCs: fields that this program lends, and fields of peers that it
//! accepts.
//!
//! **Invariant:** what is lent for an RPC comes back: the peer accepts and drops it, or it is
//! recalled when the RPC is over. A reference that cannot be used fails its RPC and nothing else.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::DataType;

use super::{Core, LinkSide, place};
use crate::endpoint::link::{GetRequest, ReceiveSlot, WaitingReceive};
use crate::endpoint::metrics::InlineReason;
use crate::endpoint::pair::MappingDevice;
use crate::endpoint::rpcs::FieldError;
use crate::endpoint::shared::OverRpc;
use crate::endpoint::slot::Slot;
use crate::endpoint::tensor::{ReceivedBytes, ReceivedTensor, SharedTensor, TensorShape};
use crate::gathered::RegisteredPart;
use crate::key::Key;
use crate::lease::LendError;
use crate::reference::{LinkId, Reference};

/// A field that was accepted.
pub(crate) enum Accepted {
    /// Its bytes are mapped.
    Here(ReceivedTensor),
    /// Its bytes are got by this link. The slot gets them.
    Coming { link: u64, slot: ReceiveSlot },
}

impl<D: MappingDevice> Core<D> {
    /// An RPC begins whose messages to the other end of this link may hold references, or why they
    /// may not.
    pub(crate) fn begin_rpc(&mut self, link: LinkId, rpc: u64) -> Result<(), InlineReason> {
        if self.server.begin_rpc(link, rpc) { Ok(()) } else { Err(self.refusal(link)) }
    }

    /// Why the server lends nothing for an RPC of this link: the other end cannot read it, or the
    /// RPC has ended.
    fn refusal(&self, link: LinkId) -> InlineReason {
        if self.may_lend(link) { InlineReason::CallOver } else { InlineReason::NoRegions }
    }

    /// A field of a message goes inline.
    pub(crate) fn field_goes_inline(&mut self, reason: InlineReason, bytes: u64) {
        self.counts.add_inline(reason, bytes);
    }

    /// A field that is mapped can be read after so long.
    pub(crate) fn field_is_here(&mut self, time: Duration) {
        self.counts.field_latencies.add(time);
    }

    /// Whether the other end of this link can read lendable memory.
    pub(crate) fn may_lend(&self, link: LinkId) -> bool {
        self.server.reads_memory(link)
    }

    /// An RPC is over at this end.
    pub(crate) fn rpc_over(&mut self, now: Nanos, over: OverRpc) {
        let OverRpc { rpc, lends, recalls, misses } = over;
        if let Some(link) = lends {
            self.server.end_rpc(link, rpc);
            if recalls {
                self.collect_returns(now, link);
                self.server.recall_rpc(link, rpc);
            }
        }
        if let Some(number) = misses.and_then(|link| self.numbers.get(&link).copied())
            && let Some(LinkSide::Receiver(side)) = self.links.get_mut(&number).map(|link| &mut link.side)
        {
            side.calls.end_rpc(rpc);
            self.touched.insert(number);
        }
        self.settle(now);
    }

    /// Reads what has come back on a link.
    fn collect_returns(&mut self, now: Nanos, link: LinkId) {
        if let Some(number) = self.numbers.get(&link).copied() {
            self.pump_regions(now, number);
        }
    }

    /// Lends a field of a message of an RPC. Returns also where it can be read over a fabric.
    pub(crate) fn lend_for_rpc(
        &mut self,
        now: Nanos,
        link: LinkId,
        rpc: u64,
        tensor: &SharedTensor,
    ) -> Result<(Reference, RegisteredPart), InlineReason> {
        let number = self.numbers.get(&link).copied().ok_or(InlineReason::NoRegions)?;
        let place = place(tensor).ok_or(InlineReason::NotLendable)?;
        let lent = match self.server.lend_for_rpc(link, rpc, place.clone(), tensor.clone()) {
            Err(LendError::TooManyLeases { .. } | LendError::TooManyBytes { .. }) => {
                // Some may be back, and were not counted yet.
                self.pump_all_regions(now);
                self.server.lend_for_rpc(link, rpc, place, tensor.clone())
            }
            lent => lent,
        };
        let reference = lent.map_err(|error| {
            tracing::debug!("a field is not lent: {error}");
            match error {
                LendError::UnknownLink { .. } => self.refusal(link),
                LendError::TooManyLeases { .. } | LendError::TooManyBytes { .. } => InlineReason::Limit,
                LendError::OutOfBounds(_) => InlineReason::NotLendable,
            }
        })?;
        let bytes = reference.slice.len;
        let pair = self.links.get(&number).and_then(|link| link.pair.as_ref());
        let Some((device, rank)) = pair.map(|pair| (pair.device, pair.rank)) else {
            self.counts.sent_in_place.add(bytes);
            self.must_poll();
            return Ok((reference, RegisteredPart::NONE));
        };
        let device = self.devices.get_mut(&device).ok_or(InlineReason::NoRegions)?;
        match device.lend_at_once(&self.memory, rank, &reference) {
            Ok(registered) => {
                self.counts.sent_copied.add(bytes);
                Ok((reference, registered))
            }
            Err(cause) => {
                // Nobody can read what is lent: the link is of no use.
                self.failed.push((number, cause));
                self.settle(now);
                Err(InlineReason::NoRegions)
            }
        }
    }

    /// Accepts a field of a message that has come.
    pub(crate) fn accept_for_rpc(
        &mut self,
        now: Nanos,
        reference: &Reference,
        registered: &RegisteredPart,
    ) -> Result<Accepted, FieldError> {
        let unknown = || FieldError::Lost(format!("link {} is not open here", reference.link));
        let number = self.numbers.get(&reference.link).copied().ok_or_else(unknown)?;
        let link = self.links.get_mut(&number).ok_or_else(unknown)?;
        let LinkSide::Receiver(side) = &mut link.side else { return Err(unknown()) };
        let hold = side.hold.upgrade().ok_or_else(unknown)?;
        let bytes = usize::try_from(reference.slice.len).map_err(FieldError::wrong)?;
        let shape = TensorShape::new(DataType::U8, &[bytes]).map_err(FieldError::wrong)?;
        let lease = side.calls.accept(reference).map_err(FieldError::wrong)?;
        let slice = lease.slice();
        if let Some(pair) = &link.pair {
            let Some(src) = registered.of(slice) else {
                lease.decline();
                self.leases_returned(now, number);
                return Err(FieldError::wrong("a reference names memory that is not registered"));
            };
            // For people: which message it is.
            let key = Key::new(0, "field of a message").map_err(FieldError::wrong)?;
            let (device, rank, slot) = (pair.device, pair.rank, Arc::new(Slot::new()));
            // The RPC has a deadline of its own.
            let deadline = Nanos(u64::MAX);
            let receive = WaitingReceive { key, slot: slot.clone(), since: now, deadline, is_field: true };
            let request = GetRequest { device, rank, receive, lease, shape, src };
            let begun = self.begin_get(number, request).map_err(FieldError::Lost);
            // Where the get did not begin its lease is back.
            self.leases_returned(now, number);
            begun?;
            return Ok(Accepted::Coming { link: number, slot });
        }
        let mapped = link.regions.as_ref().and_then(|shared| shared.regions.arena());
        let Some((_, mapping)) = mapped else {
            lease.decline();
            return Err(FieldError::wrong("a reference names memory that is not mapped here"));
        };
        // The holder has checked that it is inside of the region.
        let start = slice.offset as usize;
        let range = start..start + bytes;
        let mapped = ReceivedBytes::Mapped { mapping: mapping.clone(), range, lease, _link: hold };
        let tensor = ReceivedTensor::new(mapped, shape);
        self.counts.in_place.add(slice.len);
        Ok(Accepted::Here(tensor))
    }
}
