//! References in messages of RPCs. They travel apart from their link: they are lost, come late or
//! twice, or come to a program for which they are not.
//!
//! **Invariant:** a reference that comes first, on its link, while its RPC goes on, is accepted. No
//! reference is accepted twice, or by another program.

use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::DataType;

use super::oracle::{self, FIELD, Flaw, TensorNumber};
use super::{Held, Simulation};
use crate::endpoint::core::{Accepted, LinkSide};
use crate::endpoint::rpcs::FieldError;
use crate::endpoint::shared::OverRpc;
use crate::endpoint::tensor::{SharedTensor, TensorShape};
use crate::gathered::RegisteredPart;
use crate::reference::{LinkId, Reference};

/// The longest time that a message of an RPC is under way.
const DELAY: Duration = Duration::from_millis(10);

/// A message with a reference.
pub(super) struct Field {
    rpc: u64,
    reference: Reference,
    tensor: TensorNumber,
    owner: usize,
    due: Nanos,
    /// It was delivered.
    has_come: bool,
    is_lost: bool,
}

impl Simulation {
    /// A program lends a field for an RPC of a peer.
    pub(super) fn lend_field(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        let program = &mut self.programs[number];
        let links = program.core.links.values().filter(|link| matches!(link.side, LinkSide::Sender));
        let links: Vec<LinkId> = links.map(|link| link.id).collect();
        let Some(link) = links.get(self.random.index(links.len().max(1))).copied() else { return Ok(()) };
        let rpc = self.random.bits();
        if program.core.begin_rpc(link, rpc).is_err() {
            return Ok(());
        }
        let words = 1 + self.random.index(128);
        if let Ok(mut buffer) = program.memory.allocate(words * 8) {
            self.oracle.allocated(number, &buffer.range())?;
            let tensor = self.oracle.sent(number, FIELD, buffer.range());
            oracle::fill(tensor, buffer.as_bytes_mut());
            let shape = TensorShape::new(DataType::U64, &[words]).expect("is small");
            let lent = program.core.lend_for_rpc(now, link, rpc, &SharedTensor::of_bytes(buffer, shape));
            if let Ok((reference, _)) = lent {
                let due = now + Duration::from_nanos(self.random.below(DELAY.as_nanos() as u64));
                let (has_come, is_lost) = (false, self.random.below(5) == 0);
                self.fields.push(Field { rpc, reference, tensor, owner: number, due, has_come, is_lost });
                return Ok(());
            }
        }
        self.end_rpc(number, rpc, link, now);
        Ok(())
    }

    fn end_rpc(&mut self, owner: usize, rpc: u64, link: LinkId, now: Nanos) {
        let program = &mut self.programs[owner];
        if program.is_alive {
            let over = OverRpc { rpc, lends: Some(link), recalls: true, misses: None };
            program.core.rpc_over(now, over);
            self.wires.collect(owner, now);
        }
    }

    /// Messages that are due come, once more or for the first time, and RPCs end.
    pub(super) fn fields_come(&mut self, now: Nanos) -> Result<(), Flaw> {
        for mut field in std::mem::take(&mut self.fields) {
            if field.due > now {
                self.fields.push(field);
                continue;
            }
            if !field.is_lost {
                for receiver in 0..self.programs.len() {
                    self.field_comes(receiver, &field, now)?;
                }
            }
            // An RPC ends after its messages, which a hostile program sends again.
            if !std::mem::replace(&mut field.has_come, true) {
                self.end_rpc(field.owner, field.rpc, field.reference.link, now);
            }
            if self.random.below(3) > 0 {
                field.due = now + Duration::from_nanos(self.random.below(DELAY.as_nanos() as u64));
                self.fields.push(field);
            }
        }
        Ok(())
    }

    fn field_comes(&mut self, receiver: usize, field: &Field, now: Nanos) -> Result<(), Flaw> {
        let program = &mut self.programs[receiver];
        if !program.is_alive || program.stopped_until > now {
            return Ok(());
        }
        let Field { reference, tensor, owner, has_come, .. } = *field;
        let link = program.core.numbers.get(&reference.link).copied();
        let link = link.filter(|link| matches!(program.core.links[link].side, LinkSide::Receiver(_)));
        match program.core.accept_for_rpc(now, &reference, &RegisteredPart::NONE) {
            Ok(Accepted::Here(received)) => {
                let found = self.oracle.received(receiver, (owner, FIELD), now, received.as_bytes())?;
                if found != tensor {
                    return Err(Flaw::Other);
                }
                self.oracle.begin_reading(found, receiver);
                let link = link.unwrap_or_default();
                program.held.push(Held { tensor: received, number: found, link });
            }
            Ok(Accepted::Coming { .. }) => return Err(Flaw::Unexpected("a get".to_owned())),
            Err(FieldError::Lost(cause) | FieldError::Wrong(cause)) => {
                let is_held =
                    |link| program.holds.iter().any(|(held, hold)| *held == link && hold.strong_count() > 0);
                if !has_come && link.is_some_and(is_held) && self.is_harmless {
                    return Err(Flaw::Unexpected(cause));
                }
            }
        }
        self.wires.collect(receiver, now);
        Ok(())
    }
}
