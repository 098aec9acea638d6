//! What moving bytes costs in requests, doorbells, completions and looks at queues: exactly the
//! least that it can.
//!
//! The least, and why it is that:
//!
//! * A put with a signal is **one request**: the verbs have one operation, a write with immediate,
//!   that both places bytes and tells the target, and messages as long as a port carries
//!   (Soft-RoCE: 8 MiB; hardware: 1 or 2 GiB) need no second. So bytes beyond that length take one
//!   request for each such part; nothing less reaches the target's completion queue at all.
//! * It is **one doorbell**: only posting hands it to the NIC. Signals that were submitted together
//!   share one, as the verbs take a list of requests; a long put does not wait for others.
//! * It is **one completion here**, since its submitter waits for its own end. A signal carries its
//!   bytes in the request, so nobody waits for it, and only every 32nd asks for a completion,
//!   without which its place in the queue would never be known to be free.
//! * It is **one completion and one receive there**: an immediate uses up a receive. Receives are
//!   posted anew 64 at a time.
//! * **A look that finds something** is needed for each batch of completions; one completion under
//!   way is one batch.

use pleach_transport::verbs::Counts;
use pleach_transport::{
    Device, Event, HostMemory, Inline, Region, Signal, Source, Submitted, Transfer, TransferId,
};

use super::{PATIENCE, Two, clock};

const MIB: usize = 1 << 20;

/// What was asked of a NIC from one moment to another.
fn since(before: Counts, after: Counts) -> Counts {
    let mut counts = after;
    counts.requests -= before.requests;
    counts.doorbells -= before.doorbells;
    counts.signaled -= before.signaled;
    counts.inlined -= before.inlined;
    counts.polls -= before.polls;
    counts.polls_with_completions -= before.polls_with_completions;
    counts.completions -= before.completions;
    counts.receives -= before.receives;
    counts.receive_doorbells -= before.receive_doorbells;
    counts.registrations -= before.registrations;
    counts.deregistrations -= before.deregistrations;
    counts
}

/// Puts `total` bytes from rank 0 to rank 1 in puts of `bytes`, one after the other; what that was
/// at both ends.
fn put(two: &mut Two, regions: &[Region; 2], bytes: usize, total: usize, told_before: u64) -> [Counts; 2] {
    let before = [two.0[0].counts(), two.0[1].counts()];
    let signal_slots = two.0[1].signal_slots(0);
    for number in 0..(total / bytes) as u64 {
        let offset = number as usize * bytes % regions[0].len();
        let part = |region: &Region| region.slice(offset..offset + bytes).expect("inside");
        let signal = Some(Signal { signal_slot: 1, payload: Inline::EMPTY });
        let (src, dst) = (Source::Slice(part(&regions[0])), part(&regions[1]).remote());
        let id = TransferId(number);
        assert_eq!(two.0[0].submit(1, Transfer::Put { src, dst, signal }, id), Ok(Submitted::UnderWay));
        let mut is_done = false;
        two.until(|event, _| {
            is_done |= event == Some(Event::Done { id, result: Ok(0) });
            is_done && signal_slots.count(1) == told_before + number + 1
        });
    }
    let after = [two.0[0].counts(), two.0[1].counts()];
    [since(before[0], after[0]), since(before[1], after[1])]
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn a_mebibyte_costs_as_many_requests_doorbells_and_completions_as_it_has_puts_and_no_more() {
    let mut two = Two::connected(false);
    let regions = [0, 1].map(|rank| two.0[rank].register(HostMemory::new(MIB)).expect("registers"));
    let noise: Vec<u8> = (0..MIB).map(|index| (index * 31 % 251) as u8).collect();
    regions[0].whole().store(&noise);
    let mut told = 0;
    for (bytes, total) in [(64 << 10, MIB), (256 << 10, MIB), (MIB, MIB), (MIB, 16 * MIB)] {
        let puts = (total / bytes) as u64;
        let [here, there] = put(&mut two, &regions, bytes, total, told);
        told += puts;
        let what = format!("{puts} puts of {bytes} bytes: {here}; there: {there}");
        println!("{what}");
        assert_eq!((here.requests, here.doorbells, here.signaled), (puts, puts, puts), "{what}");
        // What comes here besides are credits that are given back, which are counted there.
        let credits = there.requests;
        assert!(credits <= 1, "credits come back together: {what}");
        assert_eq!(here.completions - here.receives, puts, "{what}");
        assert_eq!((here.inlined, here.receives), (0, credits), "{what}");
        assert_eq!((there.receives, there.completions), (puts, puts), "{what}");
        assert!(here.polls_with_completions <= puts + credits, "no look finds less than one: {what}");
        assert!(there.polls_with_completions <= puts, "{what}");
        assert!(there.receive_doorbells <= 1, "receives are posted together: {what}");
        assert_eq!((here.registrations, there.registrations), (0, 0), "no transfer registers: {what}");
    }
    assert!(regions[1].whole().to_vec() == noise, "and all bytes are there");
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn a_signal_of_eight_bytes_costs_one_request_and_one_doorbell_each_way_and_a_completion_for_each_32() {
    const TURNS: u64 = 128;
    let mut two = Two::connected(false);
    let signal_slots = [two.0[0].signal_slots(1), two.0[1].signal_slots(0)];
    let before = [two.0[0].counts(), two.0[1].counts()];
    for turn in 1..=TURNS {
        for (from, to) in [(0_usize, 1_usize), (1, 0)] {
            let payload = Inline::new(&turn.to_le_bytes()).expect("fits");
            let thrown = two.0[from].signal(to as u32, &Signal { signal_slot: 0, payload }, TransferId(0));
            assert_eq!(thrown, Ok(Submitted::Ended(0)));
            two.until(|_, _| signal_slots[to].count(0) == turn);
            assert_eq!(signal_slots[to].payload(0)[..8], turn.to_le_bytes());
        }
    }
    for (rank, before) in before.into_iter().enumerate() {
        let counts = since(before, two.0[rank].counts());
        println!("rank {rank}, {TURNS} signals each way: {counts}");
        assert_eq!((counts.requests, counts.doorbells, counts.inlined), (TURNS, TURNS, TURNS), "{counts}");
        assert_eq!(counts.receives, TURNS, "{counts}");
        // Where the count of those before began is not known: one more or less.
        assert!(counts.signaled.abs_diff(TURNS / 32) <= 1, "{counts}");
        assert!(counts.completions - counts.receives <= TURNS / 32 + 1, "{counts}");
        assert!(counts.polls_with_completions <= counts.completions, "{counts}");
        assert!(counts.receive_doorbells <= TURNS / 64 + 1, "{counts}");
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn who_sleeps_looks_at_the_queue_three_times_a_waking_at_most() {
    const PUTS: u64 = 32;
    let mut two = Two::connected(false);
    let regions = [0, 1].map(|rank| two.0[rank].register(HostMemory::new(MIB)).expect("registers"));
    let mut events = Vec::with_capacity(64);
    let (before, mut wakings) = (two.0[0].counts(), 0);
    for number in 0..PUTS {
        let (src, dst) = (Source::Slice(regions[0].whole()), regions[1].remote());
        let put = Transfer::Put { src, dst, signal: None };
        assert_eq!(two.0[0].submit(1, put, TransferId(number)), Ok(Submitted::UnderWay));
        let done = Event::Done { id: TransferId(number), result: Ok(0) };
        let deadline = clock::now() + PATIENCE;
        while !events.contains(&done) {
            assert!(clock::now() < deadline, "put {number} does not end");
            wakings += 1;
            if let Some(armed) = two.0[0].arm() {
                armed.wait(clock::now(), PATIENCE);
            }
            two.0[0].poll(clock::now(), &mut events);
        }
        events.clear();
    }
    let counts = since(before, two.0[0].counts());
    println!("{wakings} wakings for {PUTS} puts: {counts}");
    // One before it sleeps, so that nothing is missed, and one or two that find what woke it.
    assert!(counts.polls <= 3 * wakings, "{wakings} wakings: {counts}");
    assert_eq!((counts.requests, counts.doorbells), (PUTS, PUTS), "{counts}");
}
