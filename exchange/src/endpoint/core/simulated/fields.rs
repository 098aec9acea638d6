//! References in messages of RPCs. They travel apart from their link: they are lost, come late or
//! twice, or come to a program for which they are not.
//!
//! **Invariant:** a reference that comes first, on its link, while its RPC goes on, is accepted. No
//! reference is accepted twice, or by another program.

use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::DataType;

use super::oracle::{self, FIELD, Flaw, TensorNumber, Turn};
use super::{Held, Simulation};
use crate::endpoint::core::{Accepted, LinkSide};
use crate::endpoint::link::ReceiveSlot;
use crate::endpoint::rpcs::FieldError;
use crate::endpoint::shared::OverRpc;
use crate::endpoint::tensor::{ReceivedTensor, SharedTensor, TensorShape};
use crate::gathered::RegisteredPart;
use crate::reference::{LinkId, Reference};

/// The longest time that a message of an RPC is under way.
const DELAY: Duration = Duration::from_millis(10);

/// A message with a reference.
pub(crate) struct Field {
    rpc: u64,
    reference: Reference,
    registered: RegisteredPart,
    tensor: TensorNumber,
    owner: usize,
    due: Nanos,
    /// It was delivered.
    has_come: bool,
    is_lost: bool,
}

/// A field that a program gets.
pub(crate) struct Coming {
    slot: ReceiveSlot,
    link: u64,
    owner: usize,
    tensor: TensorNumber,
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
        if let Ok((reference, registered)) = lent {
            let due = now + Duration::from_nanos(simulation.random.below(DELAY.as_nanos() as u64));
            let (has_come, is_lost) = (false, simulation.random.below(5) == 0);
            let owner = number;
            let field = Field { rpc, reference, registered, tensor, owner, due, has_come, is_lost };
            simulation.fields.push(field);
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
    let Field { reference, registered, tensor, owner, has_come, .. } = *field;
    let link = program.core.numbers.get(&reference.link).copied();
    let link = link.filter(|link| matches!(program.core.links[link].side, LinkSide::Receiver(_)));
    match program.core.accept_for_rpc(now, &reference, &registered) {
        Ok(Accepted::Here(received)) => {
            simulation.oracle.begin_reading(tensor, receiver);
            has_received(simulation, receiver, (owner, tensor, link.unwrap_or_default()), received, now)?;
        }
        Ok(Accepted::Coming { link, slot }) => program.coming.push(Coming { slot, link, owner, tensor }),
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

/// A program has received a field of an owner, by its link.
fn has_received(
    simulation: &mut Simulation,
    receiver: usize,
    (owner, tensor, link): (usize, TensorNumber, u64),
    received: ReceivedTensor,
    now: Nanos,
) -> Result<(), Flaw> {
    let from = (owner, FIELD);
    let found = simulation.oracle.received(receiver, from, Turn::at(now), received.as_bytes())?;
    if found != tensor {
        return Err(Flaw::Other);
    }
    simulation.programs[receiver].held.push(Held { tensor: received, number: found, link });
    Ok(())
}

/// Programs take the fields whose gets have ended.
pub(crate) fn take(simulation: &mut Simulation, now: Nanos) -> Result<(), Flaw> {
    for receiver in 0..simulation.programs.len() {
        let program = &mut simulation.programs[receiver];
        if !program.is_alive {
            program.coming.clear();
        }
        if program.stopped_until > now {
            continue;
        }
        for Coming { slot, link, owner, tensor } in std::mem::take(&mut program.coming) {
            let program = &mut simulation.programs[receiver];
            match slot.take() {
                Some(Ok(arrived)) => {
                    let received = arrived.take();
                    program.core.leases_returned(now, link);
                    has_received(simulation, receiver, (owner, tensor, link), received, now)?;
                }
                Some(Err(error)) if simulation.is_harmless => {
                    return Err(Flaw::Unexpected(error.to_string()));
                }
                Some(Err(_)) => {}
                None if !program.core.links.contains_key(&link) => {
                    return Err(Flaw::Late("a field of a link that has ended"));
                }
                None => program.coming.push(Coming { slot, link, owner, tensor }),
            }
        }
        simulation.wires.collect(receiver, now);
    }
    Ok(())
}
