//! Peers that say anything at all: this rank goes on, or its call fails with the peer's name, and
//! nothing panics.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::sim::{Network, Options};
use pleach_transport::{Inline, RemoteSlice, Responder, SharedMemory, Signal};
use pleach_vocabulary::{Collective, DataType, ReduceOp};
use proptest::prelude::*;

use super::FIRST_SIGNAL_SLOT;
use super::fault::Fault;
use super::signals::{BufferAddress, Header};
use super::{Bytes, RunId};
use crate::call::{Amount, Counts, Descriptor};
use crate::simulate::Cluster;

/// Several chunks, so that most of them do not begin where their part does.
const LEN: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(5);

fn connected(maps: bool) -> Cluster {
    let network = Network::full_mesh(2, 1_000_000_000, Duration::from_micros(5));
    let mut cluster = Cluster::new(Options { maps, passive: maps, ..Options::new(network, 1) });
    cluster
        .run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready()))
        .expect("ranks connect");
    cluster
}

/// A call of rank 0, in which its peer has no part.
fn start(cluster: &mut Cluster) -> RunId {
    let member = cluster.members[0].as_mut().expect("it is alive");
    let (collective, amount) = (Collective::AllReduce, Amount::Each(LEN as u64));
    let descriptor = Descriptor { collective, amount, data_type: DataType::U8, op: ReduceOp::Sum, tag: 0 };
    let plan = member.planner.plan(&descriptor, &Counts::Each(LEN), None).expect("a plan").clone();
    let memory = SharedMemory::new(LEN).expect("memory");
    let bytes = Bytes::Registered(member.engine.device().register(memory).expect("registered").whole());
    let run = member.start(&plan, bytes.clone(), bytes, TIMEOUT).expect("accepted");
    cluster.wake(0);
    run
}

/// What becomes of the call: at its deadline at the latest something does.
fn outcome_of(cluster: &mut Cluster, run: RunId) -> Result<(), Arc<Fault>> {
    let mut outcome = None;
    cluster
        .run(|cluster| {
            let member = cluster.members[0].as_mut().expect("it is alive");
            outcome = member.engine.take_outcome(run);
            outcome.is_some()
        })
        .expect("deadlines pass");
    outcome.expect("`run` has returned")
}

#[test]
fn slices_that_lie_beyond_all_addresses_are_refused_with_the_name_of_who_told_of_them() {
    for maps in [false, true] {
        for offset in [u64::MAX, u64::MAX - 63, u64::MAX - LEN as u64 / 2, 1 << 63] {
            let mut cluster = connected(maps);
            let memory = SharedMemory::new(LEN).expect("memory");
            let liar = cluster.members[1].as_mut().expect("it is alive");
            let region = liar.engine.device().register(memory).expect("registered");
            let run = start(&mut cluster);
            let engine = &mut cluster.members[0].as_mut().expect("it is alive").engine;
            let buffer = BufferAddress::of(RemoteSlice { key: region.key(), offset, len: LEN as u64 });
            let payload = Header::new(0, engine.admission.history(), 0).with_buffers(buffer, buffer);
            let signal_slots = engine.device().signal_slots(1);
            for signal_slot in FIRST_SIGNAL_SLOT as u16..signal_slots.len() as u16 {
                signal_slots.signal(&Signal { signal_slot, payload });
            }
            let fault = outcome_of(&mut cluster, run).expect_err("there is no such memory");
            assert_eq!(fault.subject, 1, "maps {maps}, offset {offset}: {fault}");
        }
    }
}

/// Numbers as they are, and as they must not be.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, any::<u64>(), (0..100u64).prop_map(|less| u64::MAX - less)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn no_message_makes_a_rank_panic(
        messages in prop::collection::vec((0..8u8, prop::collection::vec(word(), 0..24)), 1..12),
        cut in 0..8usize,
    ) {
        let mut cluster = connected(false);
        let run = start(&mut cluster);
        for (kind, words) in &messages {
            let mut bytes = vec![*kind];
            bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
            let member = cluster.members[0].as_mut().expect("it is alive");
            let _ = member.board.message(1, &bytes);
            cluster.wake(0);
            cluster.settle().expect("it does not poll for ever");
        }
        // Who says that it has done its part may be believed.
        let _ = outcome_of(&mut cluster, run);
    }

    #[test]
    fn no_signal_makes_a_rank_panic(payload in prop::array::uniform6(word()), is_of_call in any::<bool>()) {
        let mut cluster = connected(false);
        let run = start(&mut cluster);
        let engine = &mut cluster.members[0].as_mut().expect("it is alive").engine;
        let mut words = payload;
        if is_of_call {
            (words[0], words[1]) = (words[0] & !((1 << 48) - 1), engine.admission.history());
        }
        let signal_slots = engine.device().signal_slots(1);
        for signal_slot in 0..signal_slots.len() as u16 {
            signal_slots.signal(&Signal { signal_slot, payload: Inline::of_words(words, 48) });
        }
        // Who says that it has done its part may be believed.
        let _ = outcome_of(&mut cluster, run);
    }
}
