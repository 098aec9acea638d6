//! Ranks that are given to other devices, one after the other, under harsh faults: whatever is
//! late, nobody takes it for the successor's.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::sim::{Fault, Random};
use pleach_transport::{
    Device, DeviceConfig, Event, Flush, Inline, Rank, Region, SharedMemory, Signal, Urgency,
};

use crate::ranks::{CONNECT_TIMEOUT, Ranks, Submission, harsh, put};

const SIGNAL_SLOT: u16 = 3;
const LEN: usize = 1_000;
const SEEDS: u64 = 150;
const DEVICES: u8 = 6;
const STEP: Duration = Duration::from_micros(3);

/// A signal that has the number of its device beside it.
fn numbered(number: u8) -> Signal {
    Signal { signal_slot: SIGNAL_SLOT, payload: Inline::new(&[number]).expect("short") }
}

/// A put with such a signal.
fn numbered_put(source: &Region, target: &Region, number: u8) -> Submission {
    let mut transfer = put(&source.whole(), target.whole().remote(), SIGNAL_SLOT);
    if let pleach_transport::Transfer::Put { signal, .. } = &mut transfer {
        *signal = Some(numbered(number));
    }
    transfer.into()
}

/// Lets some time pass, and looks at all that rank 0 knows of rank 1.
fn step(ranks: &mut Ranks, number: u8, seed: u64) {
    for rank in ranks.world.take_woken() {
        ranks.poll(rank);
    }
    // Not on to the next event, which may be the end of a connect.
    ranks.world.advance(Some(ranks.world.now() + STEP));
    let slots = ranks.device(0).signal_slots(1);
    if slots.count(SIGNAL_SLOT) > 0 {
        assert_eq!(slots.payload(SIGNAL_SLOT)[0], number, "seed {seed}: a signal of a former device");
    }
    let messages = ranks.listeners[0].heard.lock().unwrap();
    let numbers: Vec<_> = messages.iter().filter(|(from, _)| *from == 1).map(|(_, text)| text[0]).collect();
    assert!(numbers.is_sorted() && numbers.iter().all(|of| *of <= number), "seed {seed}: {numbers:?}");
}

fn count(ranks: &Ranks, rank: Rank, is_it: impl Fn(&Event) -> bool) -> usize {
    ranks.events[rank as usize].iter().filter(|event| is_it(event)).count()
}

fn ends(ranks: &Ranks, rank: Rank) -> usize {
    count(ranks, rank, |event| matches!(event, Event::PeerLost { peer: 1, .. } | Event::Departed { peer: 1 }))
}

fn replace(ranks: &mut Ranks) {
    ranks.listeners[1] = Arc::default();
    ranks.events[1].clear();
    let config = DeviceConfig {
        rank: 1,
        world_size: 3,
        secret: None,
        signal_slots: 16,
        connect_timeout: CONNECT_TIMEOUT,
        interface: None,
        address: None,
        responder: ranks.listeners[1].clone(),
    };
    ranks.devices[1] = Some(ranks.world.device(config));
}

#[test]
fn nothing_late_is_taken_for_that_of_the_next_device_of_a_rank() {
    for seed in 0..SEEDS {
        let mut random = Random::new(seed).split("returning");
        let mut options = harsh(3, seed);
        // Often found out before all of it has landed.
        options.faults.delay_per_million = 500_000;
        options.faults.detection = Duration::from_micros(30);
        let mut ranks = Ranks::connected(options);
        let (third, target) = (ranks.register(2, LEN), ranks.register(0, LEN));
        let mut ids = Vec::new();
        let mut fenced: Vec<(Region, Vec<u8>)> = Vec::new();
        for number in 1..=DEVICES {
            let memory = SharedMemory::new(LEN).expect("memory");
            let given = ranks.device(0).register_for(1, memory).expect("registered");
            let source = ranks.register(1, LEN);
            source.whole().store(&[number; LEN]);
            for _ in 0..random.below(12) {
                let _ = ranks.try_submit(1, 0, numbered_put(&source, &given, number));
                // The former process's memory is nobody's, but its signals need none.
                let _ = ranks.try_submit(1, 0, Submission::Signal(numbered(number)));
                let _ = ranks.device(1).post(0, &[number], Urgency::Ordinary);
                if let Ok(id) = ranks.try_submit(2, 0, put(&third.whole(), target.remote(), 1)) {
                    ids.push(id);
                }
                (0..random.below(20)).for_each(|_| step(&mut ranks, number, seed));
                let bytes = given.whole().to_vec();
                assert!(bytes.iter().all(|byte| [0, number].contains(byte)), "seed {seed}");
            }
            let before = [ends(&ranks, 0), ends(&ranks, 2)];
            let is_severed = |ranks: &Ranks| count(ranks, 0, |event| *event == Event::Severed { peer: 1 });
            let severed = is_severed(&ranks);
            let way = random.below(4);
            match way {
                0 => ranks.world.inject(Fault::RankDeath { rank: 1 }),
                1 | 2 => ranks.device(0).sever(1),
                _ => {
                    ranks.device(1).leave();
                    ranks.until(|ranks| ranks.device(1).flush(Flush::All));
                }
            }
            // Rank 0 may ask for the next one while the severed one still runs.
            let is_early = way == 2;
            if is_early {
                ranks.until(|ranks| is_severed(ranks) > severed);
                let address = ranks.device(1).info().address.clone();
                ranks.device(0).connect(1, &address).expect("the rank is free");
            }
            drop(source);
            ranks.devices[1] = None;
            if is_early {
                replace(&mut ranks);
            }
            ranks.until(|ranks| {
                let ended = [ends(ranks, 0), ends(ranks, 2)];
                ended[1] > before[1] && (ended[0] > before[0] || is_severed(ranks) > severed)
            });
            if is_severed(&ranks) == severed && random.coin() {
                ranks.device(0).sever(1);
                ranks.until(|ranks| is_severed(ranks) > severed);
            }
            if is_severed(&ranks) > severed {
                fenced.push((given.clone(), given.whole().to_vec()));
            }
            if !is_early {
                replace(&mut ranks);
            }
            let mut calls = [(0, 1), (1, 0), (1, 2), (2, 1)];
            random.shuffle(&mut calls);
            let mut known = number + u8::from(is_early);
            for (from, to) in calls {
                // From then on the signal slots of rank 0 are for the next one.
                known += u8::from(from == 0 && !is_early);
                let address = ranks.device(to).info().address.clone();
                ranks.device(from).connect(to, &address).expect("the rank is free");
                (0..random.below(30)).for_each(|_| step(&mut ranks, known, seed));
            }
            let connected =
                |ranks: &Ranks, rank, peer| count(ranks, rank, |event| *event == Event::Connected { peer });
            ranks.until(|ranks| {
                let number = usize::from(number);
                [0, 2]
                    .iter()
                    .all(|&rank| connected(ranks, rank, 1) == number && connected(ranks, 1, rank) == 1)
            });
            let own = ranks.device(1).info().incarnation;
            assert_eq!(ranks.device(0).incarnation(1), Some(own), "seed {seed}");
        }
        ranks.drain();
        assert!(ids.iter().all(|id| ranks.done(2, *id) == Some(Ok(0))), "seed {seed}: a third rank's put");
        assert_eq!(ranks.count(0, 2, 1), ids.len() as u64, "seed {seed}: each with its signal");
        for (region, left) in fenced {
            assert!(region.whole().to_vec() == left, "seed {seed}: a byte changed after the fence");
        }
        assert_eq!(ranks.world.transfers_under_way(), 0, "seed {seed}");
    }
}
