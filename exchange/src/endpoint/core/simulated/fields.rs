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
pub(crate) struct Field {
    rpc: u64,
    reference: Reference,
    tensor: TensorNumber,
    owner: usize,
    due: Nanos,
    /// It was delivered.
    has_come: bool,
    is_lost: bool,
}

/// A program lends a field for an RPC of a peer.
pub(crate) fn lend(simulation: &mut Simulation, number: usize, now: Nanos) -> Result<(), Flaw> {
    let program = &mut simulation.programs[number];
    let links = program.core.links.values().filter(|link| matches!(link.side, LinkSide::Sender));
    let links: Vec<LinkId> = links.map(|link| link.id).collect();
    let Some(link) = links.get(simulation.random.index(links.len().max(1))).copied() else { return Ok(()) };
    let rpc = simulation.random.bits();
    if program.core.begin_rpc(link, rpc).is_err() {
        return Ok(());
    }
    let words = 1 + simulation.random.index(128);
    if let Ok(mut buffer) = program.memory.allocate(words * 8) {
        simulation.oracle.allocated(number, &buffer.range())?;
        let tensor = simulation.oracle.sent(now, number, FIELD, buffer.range());
        oracle::fill(tensor, buffer.as_bytes_mut());
        let shape = TensorShape::new(DataType::U64, &[words]).expect("is small");
        let lent = program.core.lend_for_rpc(now, link, rpc, &SharedTensor::of_bytes(buffer, shape));
        if let Ok((reference, _)) = lent {
            let due = now + Duration::from_nanos(simulation.random.below(DELAY.as_nanos() as u64));
            let (has_come, is_lost) = (false, simulation.random.below(5) == 0);
            simulation.fields.push(Field { rpc, reference, tensor, owner: number, due, has_come, is_lost });
            return Ok(());
        }
    }
    end_rpc(simulation, number, rpc, link, now);
    Ok(())
}

fn end_rpc(simulation: &mut Simulation, owner: usize, rpc: u64, link: LinkId, now: Nanos) {
    let program = &mut simulation.programs[owner];
    if program.is_alive {
        let over = OverRpc { rpc, lends: Some(link), recalls: true, misses: None };
        program.core.rpc_over(now, over);
        simulation.wires.collect(owner, now);
    }
}

/// Messages that are due come, once more or for the first time, and RPCs end.
pub(crate) fn come(simulation: &mut Simulation, now: Nanos) -> Result<(), Flaw> {
    for mut field in std::mem::take(&mut simulation.fields) {
        if field.due > now {
            simulation.fields.push(field);
            continue;
        }
        if !field.is_lost {
            for receiver in 0..simulation.programs.len() {
                comes(simulation, receiver, &field, now)?;
            }
        }
        // An RPC ends after its messages, which a hostile program sends again.
        if !std::mem::replace(&mut field.has_come, true) {
            end_rpc(simulation, field.owner, field.rpc, field.reference.link, now);
        }
        if simulation.random.below(3) > 0 {
            field.due = now + Duration::from_nanos(simulation.random.below(DELAY.as_nanos() as u64));
            simulation.fields.push(field);
        }
    }
    Ok(())
}

fn comes(simulation: &mut Simulation, receiver: usize, field: &Field, now: Nanos) -> Result<(), Flaw> {
    let program = &mut simulation.programs[receiver];
    if !program.is_alive || program.stopped_until > now {
        return Ok(());
    }
    let Field { reference, tensor, owner, has_come, .. } = *field;
    let link = program.core.numbers.get(&reference.link).copied();
    let link = link.filter(|link| matches!(program.core.links[link].side, LinkSide::Receiver(_)));
    match program.core.accept_for_rpc(now, &reference, &RegisteredPart::NONE) {
        Ok(Accepted::Here(received)) => {
            let found = simulation.oracle.received(receiver, (owner, FIELD), now, received.as_bytes())?;
            if found != tensor {
                return Err(Flaw::Other);
            }
            simulation.oracle.begin_reading(found, receiver);
            let link = link.unwrap_or_default();
            program.held.push(Held { tensor: received, number: found, link });
        }
        Ok(Accepted::Coming { .. }) => return Err(Flaw::Unexpected("a get".to_owned())),
        Err(FieldError::Lost(cause) | FieldError::Wrong(cause)) => {
            let is_held =
                |link| program.holds.iter().any(|(held, hold)| *held == link && hold.strong_count() > 0);
            if !has_come && link.is_some_and(is_held) && simulation.is_harmless {
                return Err(Flaw::Unexpected(cause));
            }
        }
    }
    simulation.wires.collect(receiver, now);
    Ok(())
}
