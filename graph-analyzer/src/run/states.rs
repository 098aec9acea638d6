//! How an iteration went on a rank that computes for a caller, as it tells the others.
//!
//! An iteration whose part does not run, for the data of one request, must not end the run. So each
//! rank sends a *state* with each iteration to the caller and to the ranks that it sends tensors
//! to: nothing if all is well, or else a text. A rank that gets a text computes nothing, sends
//! stand-ins for its tensors, and passes the text on.
//!
//! States are channels like those of tensors, with numbers after theirs ([`Job::channels`]).

use pleach_transport::{Rank, Slice, Space};

use super::bytes::{of_received, of_slice_mut};
use super::channels::{Channel, Form, Received, TensorForm};
use super::plan::Job;
use super::transport::{TensorTransport, TransportError};
use crate::element::ElementType;

/// The longest text, in bytes.
const TEXT_BYTES_MAX: usize = 512;

impl Job<'_> {
    /// Between which ranks states go: nothing without a caller.
    fn state_pairs(&self) -> Vec<(Rank, Rank)> {
        let Some(caller) = self.partition.caller() else { return Vec::new() };
        let crossings = self.partition.crossings().iter().map(|crossing| (crossing.from, crossing.to));
        let mut pairs: Vec<(Rank, Rank)> = crossings.filter(|(from, _)| *from != caller).collect();
        pairs.extend((0..caller).map(|rank| (rank, caller)));
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// The channels of states, which follow those of tensors.
    pub(crate) fn state_channels(&self) -> impl Iterator<Item = Channel> {
        let form = Form::Fetch { element: Some(ElementType::U8), dimensions: Some(1) };
        let channel = move |(from, to)| {
            let (tensor, space) = (format!("state of rank {from}"), Space::Host);
            Channel { tensor, from, to, form, space }
        };
        self.state_pairs().into_iter().map(channel)
    }

    /// The numbers of the channels by which states come to a rank, by sender.
    pub(crate) fn states_to(&self, rank: Rank) -> Vec<usize> {
        self.states(|(_, to)| to == rank)
    }

    fn states(&self, is_it: impl Fn((Rank, Rank)) -> bool) -> Vec<usize> {
        let pairs = (self.partition.crossings().len()..).zip(self.state_pairs());
        pairs.filter(|(_, pair)| is_it(*pair)).map(|(number, _)| number).collect()
    }
}

/// The text of a state; nothing if all is well.
pub(crate) fn text_of(received: &Received) -> Option<String> {
    let bytes = of_received(received);
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).into_owned())
}

/// The states that a rank sends and gets.
pub(crate) struct States {
    outgoing: Vec<usize>,
    incoming: Vec<usize>,
    /// By slot.
    memory: Vec<Option<Slice>>,
}

impl States {
    /// Those of a rank that computes for a caller; nothing if there is none.
    pub(crate) fn of(job: &Job<'_>, rank: Rank, depth: u32) -> Option<Self> {
        job.partition.caller().filter(|caller| rank < *caller)?;
        let (outgoing, incoming) = (job.states(|(from, _)| from == rank), job.states_to(rank));
        Some(Self { outgoing, incoming, memory: vec![None; depth as usize] })
    }

    /// What the ranks before tell of an iteration: the first text, if any.
    pub(crate) fn hear(
        &self,
        transport: &mut dyn TensorTransport,
        iteration: u64,
    ) -> Result<Option<String>, TransportError> {
        let mut first = None;
        for &channel in &self.incoming {
            let received = transport.receive(channel, iteration)?;
            first = first.or_else(|| text_of(&received));
            transport.release(channel, iteration)?;
        }
        Ok(first)
    }

    /// Tells how an iteration went; an empty text: well.
    pub(crate) fn tell(
        &mut self,
        transport: &mut dyn TensorTransport,
        iteration: u64,
        text: &str,
    ) -> Result<(), TransportError> {
        for &channel in &self.outgoing {
            transport.wait_free(channel, iteration)?;
        }
        let slot = (iteration % self.memory.len() as u64) as usize;
        let memory = match &self.memory[slot] {
            Some(memory) => memory.clone(),
            None => self.memory[slot].insert(transport.memory(TEXT_BYTES_MAX)?).clone(),
        };
        let text = &text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)];
        let mut slice = memory.slice(0..text.len()).expect("it is no longer");
        of_slice_mut(&mut slice).copy_from_slice(text);
        let form = TensorForm { element: ElementType::U8, dims: vec![text.len() as u64] };
        for &channel in &self.outgoing {
            transport.send(channel, iteration, slice.clone(), &form)?;
        }
        Ok(())
    }
}
