//! Memory that a caller lends for one blocking call, registered for that time where registering is
//! free.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use pleach_transport::{Memory, RegisterError, Share, Space, clock};

use super::Group;
use super::bound::BoundCall;
use super::data::{part, place_in};
use super::error::CollectiveError;
use super::unwinding::end_process;
use crate::engine::{Address, Bytes, Engine};

/// From this length on, in bytes, registering for the time of a call is worth it; shorter slices
/// are staged.
const LENT_BYTES_MIN: usize = 4096;

/// A slice of the caller. Nobody holds it after the call: see
/// [`TemporaryRegistration::is_returned`].
struct LentMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the caller's slice stays where it is for the time of the call, which ends only when
// `TemporaryRegistration::is_returned` says that nothing holds this value any more.
unsafe impl Memory for LentMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn len(&self) -> usize {
        self.len
    }
    fn space(&self) -> Space {
        Space::Host
    }
    fn share(&self) -> Share<'_> {
        Share::Private
    }
}

// SAFETY: an address; see `Memory`.
unsafe impl Send for LentMemory {}
// SAFETY: as above.
unsafe impl Sync for LentMemory {}

impl Group {
    /// Registers the caller's slices for the time of the call, where that is free; input and output
    /// stay the same slice, or one a part of the other, where they are.
    #[inline]
    pub(super) fn lend(
        &self,
        engine: &mut Engine,
        call: &mut BoundCall,
    ) -> Result<TemporaryRegistration, CollectiveError> {
        if call.is_private() && self.space() == Space::Host {
            Self::register_for_call(engine, call)
        } else {
            Ok(TemporaryRegistration::default())
        }
    }

    fn register_for_call(
        engine: &mut Engine,
        call: &mut BoundCall,
    ) -> Result<TemporaryRegistration, CollectiveError> {
        let mut registration = TemporaryRegistration::default();
        let register = |error| CollectiveError::Register(Arc::new(error));
        let input = std::mem::replace(&mut call.input, Bytes::None);
        let output = std::mem::replace(&mut call.output, Bytes::None);
        let output_in_input = place_in(&output, &input);
        let input_in_output = place_in(&input, &output);
        (call.input, call.output) = if let Some(range) = output_in_input {
            let whole = registration.register(engine, input).map_err(register)?;
            (whole.clone(), part(&whole, range))
        } else if let Some(range) = input_in_output {
            let whole = registration.register(engine, output).map_err(register)?;
            (part(&whole, range), whole)
        } else {
            let input = registration.register(engine, input).map_err(register)?;
            (input, registration.register(engine, output).map_err(register)?)
        };
        Ok(registration)
    }

    /// Waits until the device has let go of what was lent to it for one call: its own housekeeping,
    /// done when it is polled. A peer that does not read what it asked for can keep it from that;
    /// then the group ends, which takes the memory out of every peer's reach.
    pub(super) fn take_back(&self, registration: &TemporaryRegistration) {
        if registration.is_empty() {
            return;
        }
        let driver = &self.shared.driver;
        let is_returned = || {
            let until = clock::now() + self.shared.close_timeout;
            driver.drive(driver.lock(), until, |_| registration.is_returned().then_some(())).is_some()
        };
        if is_returned() {
            return;
        }
        self.abort();
        if !is_returned() {
            end_process("a device holds memory that was lent for one call, and would write to it later");
        }
    }
}

/// The memory that is lent to the engine for one call. The memory is the caller's. **Invariant:**
/// this value is dropped only after the device has let go of all of the memory; otherwise the
/// process is ended.
#[derive(Default)]
pub(super) struct TemporaryRegistration {
    memory: Vec<Weak<LentMemory>>,
}

impl TemporaryRegistration {
    /// The same bytes, registered if that is free and worth it.
    pub(super) fn register(&mut self, engine: &mut Engine, bytes: Bytes) -> Result<Bytes, RegisterError> {
        let Bytes::Private { base: Address(base), len } = bytes else { return Ok(bytes) };
        let Some(base) = NonNull::new(base) else { return Ok(bytes) };
        if len < LENT_BYTES_MIN || !engine.device().info().registers_freely {
            return Ok(bytes);
        }
        let memory = Arc::new(LentMemory { base, len });
        self.memory.push(Arc::downgrade(&memory));
        Ok(Bytes::Registered(engine.device().register(memory)?.whole()))
    }

    /// Whether the device has let go of everything, as it must before the caller gets the slice
    /// back.
    fn is_returned(&self) -> bool {
        self.memory.iter().all(|memory| memory.strong_count() == 0)
    }

    /// Whether anything was lent.
    pub(super) fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }
}

impl Drop for TemporaryRegistration {
    fn drop(&mut self) {
        if !self.is_returned() {
            end_process("a panic came up while a device held memory that was lent for one call");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pleach_transport::rendezvous::World;

    use super::*;
    use crate::group::Options;

    /// A group of one rank, and memory that somebody holds on to as a device may.
    fn registration() -> (Group, TemporaryRegistration, Arc<LentMemory>) {
        let options = Options { close_timeout: Duration::from_millis(50), ..Options::new(World::alone()) };
        let group = Group::join(&options).expect("nobody else is needed");
        let memory = Arc::new(LentMemory { base: NonNull::dangling(), len: 0 });
        let registration = TemporaryRegistration { memory: vec![Arc::downgrade(&memory)] };
        (group, registration, memory)
    }

    #[test]
    fn memory_that_a_device_keeps_comes_back_when_its_group_has_ended() {
        let (group, registration, memory) = registration();
        let device = std::thread::spawn({
            let group = group.clone();
            move || {
                while group.barrier().is_ok() {
                    std::thread::yield_now();
                }
                drop(memory);
            }
        });
        group.take_back(&registration);
        assert!(registration.is_returned());
        device.join().expect("it ends well");
        assert!(group.barrier().is_err(), "the group has ended");
    }
}
