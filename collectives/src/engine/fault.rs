//! The fault that ended a group: the same value on every survivor. How ranks agree on it:
//! [`super::agreement`].

use std::cmp::Ordering;
use std::fmt;
use std::time::Duration;

use pleach_transport::LossKind;
use pleach_vocabulary::{Collective, Rank};

use super::message::{put_bytes, put_words, take_bytes, take_words};
use crate::call::{DESCRIPTOR_WORDS, Descriptor};

/// Longest text in a fault, in bytes; longer ones are cut.
const TEXT_BYTES_MAX: usize = 240;

/// The kind of a fault. Kinds that are more likely a cause come before kinds that are more likely a
/// consequence: of two faults in one call the earlier kind is the group's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(u8)]
pub enum FaultKind {
    /// [`Fault::subject`] called abort.
    Aborted = 1,
    /// [`Fault::subject`] was asked for something else.
    Mismatch = 2,
    /// The GPU that computes at [`Fault::subject`] has failed.
    Compute = 3,
    /// [`Fault::found_by`] has no room for a mapping of [`Fault::subject`]'s memory.
    OutOfReach = 4,
    /// [`Fault::subject`] is gone without bye.
    Lost = 5,
    /// [`Fault::subject`] closed its group while others still needed it.
    Left = 6,
    /// [`Fault::subject`] refused an access or broke the protocol.
    Protocol = 7,
    /// A deadline passed while waiting for [`Fault::subject`].
    TimedOut = 8,
    /// The epoch of a session is over; the other ranks are not told this by the group.
    Changed = 9,
}

impl FaultKind {
    const ALL: [Self; 8] = [
        Self::Aborted,
        Self::Mismatch,
        Self::Compute,
        Self::OutOfReach,
        Self::Lost,
        Self::Left,
        Self::Protocol,
        Self::TimedOut,
    ];
}

/// Why a group has failed: the same on all ranks that survive and reach each other, also when
/// several things happen at once. Then the lowest run goes first, then the lowest kind, then the
/// lowest subject; faults that were found in no call go last.
///
/// Two faults are equal when their kinds, subjects, runs and calls are. The finder, how long the
/// finder had waited, and how a loss showed itself there are details: the survivors agree on these
/// too, so their texts are alike.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The rank that found it out.
    pub found_by: Rank,
    /// The rank that it is about.
    pub subject: Rank,
    /// How the finder saw that the subject was lost, where [`Fault::kind`] is [`FaultKind::Lost`].
    /// Two finders of one loss may see different kinds.
    pub loss: Option<LossKind>,
    /// Number of the run in which it happened (collectives are numbered from 0).
    pub run: u64,
    /// The finder's call, if it was in one.
    pub during: Option<Descriptor>,
    /// The subject's call, where the two differ.
    pub theirs: Option<Descriptor>,
    /// The step of the schedule that waited, the cause of a loss, or the cycle of ranks that wait
    /// for each other, in words.
    pub detail: String,
    /// How long the finder had waited.
    pub waited: Duration,
    /// Which call of this rank was told, where the fault was found in no call. The only part on
    /// which the survivors do not agree: `{:#}` prints it behind the text that all print.
    pub told_during: Option<Descriptor>,
}

impl PartialEq for Fault {
    fn eq(&self, other: &Self) -> bool {
        self.verdict() == other.verdict()
    }
}

impl Eq for Fault {}

impl Fault {
    /// The rank that is gone or late, if that is the fault.
    pub(crate) fn late(&self) -> Option<Rank> {
        matches!(self.kind, FaultKind::Lost | FaultKind::Left | FaultKind::TimedOut).then_some(self.subject)
    }

    /// The values by which two ranks have found the same fault, in the order in which one fault
    /// goes before another.
    fn verdict(&self) -> impl Ord + use<> {
        let words = |descriptor: &Option<Descriptor>| descriptor.map(Descriptor::to_words);
        let calls = (words(&self.during), words(&self.theirs));
        (self.during.is_none(), self.run, self.kind, self.subject, calls)
    }

    /// The order in which one fault is the group's verdict rather than another; equal only byte for
    /// byte.
    pub(crate) fn compare(&self, other: &Self) -> Ordering {
        let verdicts = self.verdict().cmp(&other.verdict());
        let details = |fault: &Self| (fault.found_by, fault.waited, fault.loss);
        verdicts.then_with(|| details(self).cmp(&details(other))).then_with(|| self.detail.cmp(&other.detail))
    }

    /// As peers will hear it: with a text that is not too long.
    pub(super) fn as_told(&self) -> Self {
        Self::read(&mut &*self.to_bytes()).expect("a fault is read as it was written")
    }

    /// The fault without [`Fault::told_during`], on which ranks do not agree.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    pub(super) fn write(&self, message: &mut Vec<u8>) {
        let kind = self.kind as u64 | u64::from(self.loss.map_or(0, LossKind::code)) << u8::BITS;
        put_words(message, [kind, u64::from(self.found_by) | u64::from(self.subject) << 32, self.run]);
        for descriptor in [&self.during, &self.theirs] {
            put_words(message, descriptor.map_or([0; DESCRIPTOR_WORDS], Descriptor::to_words));
        }
        put_words(message, [u64::try_from(self.waited.as_nanos()).unwrap_or(u64::MAX)]);
        let mut end = self.detail.len().min(TEXT_BYTES_MAX);
        while !self.detail.is_char_boundary(end) {
            end -= 1;
        }
        put_bytes(message, &self.detail.as_bytes()[..end]);
    }

    pub(super) fn read(message: &mut &[u8]) -> Option<Self> {
        let [kind, ranks, run] = take_words(message)?;
        let [kind, loss, 0, 0, 0, 0, 0, 0] = kind.to_le_bytes() else { return None };
        let kind = FaultKind::ALL.into_iter().find(|item| *item as u8 == kind)?;
        let loss = match loss {
            0 => None,
            code => Some(LossKind::from_code(code)?),
        };
        let during = Descriptor::from_words(take_words(message)?);
        let theirs = Descriptor::from_words(take_words(message)?);
        let [waited_ns] = take_words(message)?;
        let detail = String::from_utf8_lossy(take_bytes(message, TEXT_BYTES_MAX)?).into_owned();
        Some(Self {
            kind,
            found_by: ranks as u32,
            subject: (ranks >> 32) as u32,
            loss,
            run,
            during,
            theirs,
            detail,
            waited: Duration::from_nanos(waited_ns),
            told_during: None,
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found_by, subject, run, detail, .. } = self;
        let waited_ms = self.waited.as_secs_f64() * 1e3;
        match self.kind {
            FaultKind::TimedOut => write!(
                formatter,
                "rank {found_by} waited {waited_ms:.0} ms for rank {subject}: {detail}; look whether rank {subject} is \
                 stopped, stuck or slow, or allow more time (Options::timeout, Group::within)"
            ),
            FaultKind::Lost => {
                write!(
                    formatter,
                    "rank {subject} is lost: {detail} (found by rank {found_by}); see its own output"
                )
            }
            FaultKind::Left => write!(
                formatter,
                "rank {subject} has closed the group while rank {found_by} still needs it ({detail}); it made fewer calls"
            ),
            FaultKind::Mismatch => {
                let of = |descriptor: &Option<Descriptor>| {
                    descriptor
                        .map_or_else(|| "something else".to_owned(), |descriptor| descriptor.to_string())
                };
                write!(
                    formatter,
                    "rank {found_by} called {} but rank {subject} called {} (call {run} of the group)",
                    of(&self.during),
                    of(&self.theirs)
                )?;
                let is_message = |descriptor: &Option<Descriptor>| {
                    descriptor.is_some_and(|it| matches!(it.collective, Collective::SendRecv { .. }))
                };
                // With a detail the ranks wait for each other in a cycle.
                if detail.is_empty() {
                    return write!(formatter, "; make both call the same");
                }
                if is_message(&self.during) && is_message(&self.theirs) {
                    write!(
                        formatter,
                        ", and {detail}; start one message without waiting for it (Group::start), or put both \
                         into one batch"
                    )?;
                } else {
                    write!(formatter, "; make both call the same, for {detail}")?;
                }
                write!(
                    formatter,
                    "; where another thread is about to make the missing call, set Options::concurrent_calls"
                )
            }
            FaultKind::Aborted => write!(formatter, "rank {subject} aborted the group"),
            FaultKind::Changed => write!(formatter, "the members of the session have changed: {detail}"),
            FaultKind::Protocol => write!(
                formatter,
                "rank {subject} broke the protocol as seen by rank {found_by}: {detail}; do all ranks run the same pleach?"
            ),
            FaultKind::OutOfReach => write!(
                formatter,
                "rank {found_by} cannot map memory of rank {subject} ({detail}); raise its limits ('ulimit -v', 'ulimit -n', \
                 vm.max_map_count), use less memory, or take fabric tcp"
            ),
            FaultKind::Compute => write!(
                formatter,
                "rank {subject} cannot compute: {detail}; see its own output, and 'nvidia-smi -q' and 'dmesg' on its host"
            ),
        }?;
        match self.during {
            Some(during) if self.kind != FaultKind::Mismatch => {
                write!(formatter, " (during {during}, call {run} of the group)")
            }
            Some(_) => Ok(()),
            // The survivors agree on all but this.
            None => match self.told_during {
                Some(during) if formatter.alternate() => write!(formatter, " (told during {during})"),
                _ => Ok(()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::{DataType, ReduceOp};

    use super::*;
    use crate::call::Amount;

    fn call(collective: Collective) -> Descriptor {
        let (amount, data_type, op) = (Amount::Each(5), DataType::F32, ReduceOp::Sum);
        Descriptor { collective, amount, data_type, op, tag: 0 }
    }

    #[test]
    fn ranks_that_send_to_each_other_are_told_to_start_one_message_and_others_to_call_the_same() {
        let of = |theirs, detail: &str| Fault {
            kind: FaultKind::Mismatch,
            found_by: 0,
            subject: 1,
            loss: None,
            run: 0,
            during: Some(call(Collective::SendRecv { from: 0, to: 1 })),
            theirs: Some(call(theirs)),
            detail: detail.to_owned(),
            waited: Duration::ZERO,
            told_during: None,
        };
        let cycle = "rank 0 waits for rank 1, which waits for rank 0";
        let text = of(Collective::SendRecv { from: 1, to: 0 }, cycle).to_string();
        assert!(text.contains("Group::start") && text.contains("batch"), "{text}");
        assert!(text.contains(cycle) && !text.contains("call the same"), "{text}");
        assert!(text.ends_with("set Options::concurrent_calls"), "{text}");
        let text = of(Collective::Barrier, cycle).to_string();
        assert!(text.contains("make both call the same") && text.contains("concurrent_calls"), "{text}");
        let text = of(Collective::SendRecv { from: 0, to: 1 }, "").to_string();
        assert!(text.ends_with("make both call the same"), "{text}");
    }

    #[test]
    fn the_call_that_was_told_is_no_part_of_what_all_survivors_say() {
        let told = |call| Fault {
            kind: FaultKind::Lost,
            found_by: 0,
            subject: 2,
            loss: None,
            run: 3,
            during: None,
            theirs: None,
            detail: "its process ended".to_owned(),
            waited: Duration::ZERO,
            told_during: Some(call),
        };
        let (one, other) = (told(call(Collective::Barrier)), told(call(Collective::AllReduce)));
        assert_eq!((&one, one.to_string(), one.to_bytes()), (&other, other.to_string(), other.to_bytes()));
        assert_eq!(format!("{one:#}"), format!("{one} (told during barrier)"));
    }

    #[test]
    fn a_fault_survives_the_wire_and_truncation_is_refused() {
        let during = Descriptor {
            collective: Collective::Reduce { root: 3 },
            amount: Amount::Each(5),
            data_type: DataType::Bf16,
            op: ReduceOp::Avg,
            tag: 9,
        };
        let fault = Fault {
            kind: FaultKind::Mismatch,
            found_by: 1,
            subject: 2,
            loss: None,
            run: 77,
            during: Some(during),
            theirs: Some(Descriptor { amount: Amount::Each(6), ..during }),
            detail: "lane 0".to_owned(),
            waited: Duration::from_micros(5),
            told_during: None,
        };
        let bytes = fault.to_bytes();
        let read = Fault::read(&mut &*bytes).expect("it is whole");
        assert_eq!(read.compare(&fault), Ordering::Equal);
        for end in 0..bytes.len() {
            assert!(Fault::read(&mut &bytes[..end]).is_none(), "cut at {end}");
        }
        assert!(fault.to_string().contains("of 5 bf16 (avg)"), "{fault}");
    }

    #[test]
    fn the_kind_of_a_loss_reaches_other_ranks_and_tells_no_two_verdicts_apart() {
        let of = |loss| Fault {
            kind: FaultKind::Lost,
            found_by: 1,
            subject: 2,
            loss,
            run: 77,
            during: None,
            theirs: None,
            detail: String::new(),
            waited: Duration::ZERO,
            told_during: None,
        };
        let known = (0..=u8::MAX).filter_map(LossKind::from_code);
        let faults: Vec<Fault> = known.map(Some).chain([None]).map(of).collect();
        assert!(faults.len() > 12, "{faults:?}");
        for fault in &faults {
            let read = Fault::read(&mut &*fault.to_bytes()).expect("it is whole");
            assert_eq!(read.loss, fault.loss);
            for other in &faults {
                assert_eq!(fault, other, "how a rank saw it is a detail");
                let is_same = fault.to_bytes() == other.to_bytes();
                assert_eq!(fault.compare(other) == Ordering::Equal, is_same);
            }
        }
        for (at, unknown) in [(0, 200), (1, 200), (2, 1)] {
            let mut bytes = faults[0].to_bytes();
            bytes[at] = unknown;
            assert!(Fault::read(&mut &*bytes).is_none(), "byte {at}");
        }
    }
}
