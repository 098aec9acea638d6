//! Line 11: after `arm` returned a wake source nothing comes without waking it; any thread may
//! wake.
//!
//! The loop under test is the one of every sleeper, the groups' driver among them: poll, look, and
//! then arm, look again and wait by [`sleep::unless_ready`]. A lost wake-up shows as a sleep that
//! lasts to its limit.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_transport::{Armed, Device, Event, Flush, Submitted, Transfer, TransferId, Urgency, clock, sleep};

use crate::world::{BackendKind, PATIENCE, QUESTION, Submission, World, noise, put, signal, skip};

/// A sleep that lasts so long was not ended by the wake source.
const WAKE_LIMIT: Duration = Duration::from_secs(20);

const SIGNAL_SLOT: u16 = 9;

const NO_THREADS: &str = "runs on one thread in virtual time: nobody sleeps";

/// Sleeps once: arms, looks, and waits for the wake source; fails when it does not wake.
fn sleep_once(device: &mut dyn Device, holds: &mut impl FnMut(&[Event]) -> bool, events: &[Event]) {
    sleep::unless_ready(
        device,
        |device| device.arm(),
        |_| holds(events),
        |device, armed| wait_for(device, &armed),
    );
}

/// Waits for the wake source; fails when it does not wake.
fn wait_for(device: &mut dyn Device, armed: &Armed) {
    let began = clock::now();
    armed.wait(began, WAKE_LIMIT);
    assert!(clock::now().since(began) < WAKE_LIMIT, "{} slept on and was not woken", device.info().fabric);
}

/// Sleeps until something holds, by wake sources alone.
fn sleep_until(device: &mut dyn Device, what: &str, mut holds: impl FnMut(&[Event]) -> bool) {
    let deadline = clock::now() + PATIENCE;
    let mut events = Vec::with_capacity(64);
    loop {
        device.poll(clock::now(), &mut events);
        if holds(&events) {
            return;
        }
        assert!(clock::now() < deadline, "{}: {what} did not come: {events:?}", device.info().fabric);
        sleep_once(device, &mut holds, &events);
    }
}

/// A rank on a thread of its own that is polled until it is told to stop.
struct Companion {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Box<dyn Device>>,
}

impl Companion {
    /// Polls `device` and calls `turn` with the number of the round before each polling.
    fn start(
        mut device: Box<dyn Device>,
        mut turn: impl FnMut(&mut dyn Device, u64) + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let deadline = clock::now() + PATIENCE + PATIENCE;
            let mut events = Vec::with_capacity(64);
            let mut round = 0;
            // Relaxed: says only that the test is over.
            while !stopped.load(Ordering::Relaxed) && clock::now() < deadline {
                turn(device.as_mut(), round);
                round += 1;
                device.poll(clock::now(), &mut events);
                events.clear();
                std::thread::yield_now();
            }
            device
        });
        Self { stop, thread }
    }

    fn finish(self) -> Box<dyn Device> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the companion does not panic")
    }
}

pub(crate) fn signals_wake_a_sleeper_every_time(backend: BackendKind) {
    const ROUNDS: u64 = 300;
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let mut sleeper = world.take(0);
    let (mine, theirs) = (sleeper.signal_slots(1), world.signal_slots(1, 0));
    let mut answered = 0;
    // Answers each signal of the sleeper after a while that differs from round to round, so that
    // the answer meets the sleeper at each point of its loop.
    let companion = Companion::start(world.take(1), move |device, _| {
        if theirs.count(SIGNAL_SLOT) == answered {
            return;
        }
        for _ in 0..(answered * 7919) % 4000 {
            std::hint::spin_loop();
        }
        if device.signal(0, &signal(SIGNAL_SLOT, b""), TransferId(answered)).is_ok() {
            answered += 1;
        }
    });
    for round in 0..ROUNDS {
        sleeper.signal(1, &signal(SIGNAL_SLOT, b""), TransferId(round)).expect("one under way");
        sleep_until(sleeper.as_mut(), "a signal", |_| mine.count(SIGNAL_SLOT) > round);
    }
    companion.finish();
}

/// Where in its loop a sleeper is when a signal comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    BeforeArming,
    AfterArming,
    BeforeWaiting,
}

pub(crate) fn a_signal_at_each_point_of_the_loop_wakes_a_sleeper(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let mut sleeper = world.take(0);
    let mine = sleeper.signal_slots(1);
    let mut count = 0;
    for round in 0..20 {
        for now in [Moment::BeforeArming, Moment::AfterArming, Moment::BeforeWaiting] {
            let mut is_told = false;
            let signal = RefCell::new(|moment| {
                if moment == now && !std::mem::replace(&mut is_told, true) {
                    world.submit(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b"")));
                    // From then on the sleeper's end gets it without another poll of this one.
                    world.until("the signal to go out", |world| world.device(1).flush(Flush::Transfers));
                }
            });
            let mut events = Vec::with_capacity(64);
            let deadline = clock::now() + PATIENCE;
            while mine.count(SIGNAL_SLOT) == count {
                sleeper.poll(clock::now(), &mut events);
                signal.borrow_mut()(Moment::BeforeArming);
                assert!(clock::now() < deadline, "{} {now:?} in round {round}: no signal", backend.name);
                sleep::unless_ready(
                    sleeper.as_mut(),
                    |sleeper| {
                        let armed = sleeper.arm();
                        signal.borrow_mut()(Moment::AfterArming);
                        armed
                    },
                    |_| mine.count(SIGNAL_SLOT) > count,
                    |sleeper, armed| {
                        signal.borrow_mut()(Moment::BeforeWaiting);
                        wait_for(sleeper, &armed);
                    },
                );
            }
            count += 1;
        }
    }
}

pub(crate) fn the_end_of_a_transfer_wakes_a_sleeper(backend: BackendKind) {
    const LEN: usize = 3 << 20;
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(0, &noise(1, LEN)), world.region_of(1, &noise(2, LEN)));
    let mut sleeper = world.take(0);
    let companion = Companion::start(world.take(1), |_, _| {});
    for number in 0..20 {
        let id = TransferId(number);
        let transfer = match number % 2 {
            0 => put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)),
            _ => Transfer::Get { src: target.remote(), dst: source.whole() },
        };
        if sleeper.submit(1, transfer, id).expect("one under way") != Submitted::UnderWay {
            continue;
        }
        let done = Event::Done { id, result: Ok(0) };
        sleep_until(sleeper.as_mut(), "the end of a transfer", |events| events.contains(&done));
    }
    companion.finish();
}

pub(crate) fn a_wake_source_armed_when_something_is_there_already_does_not_keep_silent(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region(0, backend.long_bytes), world.region(1, backend.long_bytes));
    let mut sleeper = world.take(0);
    let companion = Companion::start(world.take(1), |_, _| {});
    let mut events = Vec::with_capacity(64);
    for number in 0..50 {
        let id = TransferId(number);
        let long = put(&source.whole(), target.remote(), Some(SIGNAL_SLOT));
        if sleeper.submit(1, long, id).expect("one under way") != Submitted::UnderWay {
            continue;
        }
        let done = Event::Done { id, result: Ok(0) };
        let deadline = clock::now() + PATIENCE;
        // Arms first: whatever submit has brought about is there before the first polling.
        while !events.contains(&done) {
            sleep_once(sleeper.as_mut(), &mut |events| events.contains(&done), &events);
            events.clear();
            sleeper.poll(clock::now(), &mut events);
            assert!(clock::now() < deadline, "{}: no end of transfer {number}", backend.name);
        }
    }
    companion.finish();
}

pub(crate) fn a_message_wakes_a_sleeper(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let inbox = world.inbox(0);
    let mut sleeper = world.take(0);
    let companion = Companion::start(world.take(1), |_, _| {});
    for round in 1..=50 {
        sleeper.post(1, &[QUESTION, round as u8], Urgency::Ordinary).expect("one under way");
        sleep_until(sleeper.as_mut(), "an answer", |_| inbox.state().messages.len() == round);
    }
    companion.finish();
}

pub(crate) fn any_thread_wakes(backend: BackendKind) {
    const ROUNDS: usize = 100;
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let mut sleeper = world.take(0);
    for round in 0..ROUNDS {
        let woken = Arc::new(AtomicBool::new(false));
        let (waker, says) = (Arc::clone(&sleeper.info().waker), Arc::clone(&woken));
        let thread = std::thread::spawn(move || {
            for _ in 0..(round * 7919) % 3000 {
                std::hint::spin_loop();
            }
            says.store(true, Ordering::Release); // Pairs with the acquire below.
            waker.wake();
        });
        sleep_until(sleeper.as_mut(), "a wake", |_| woken.load(Ordering::Acquire));
        thread.join().expect("waking does not panic");
    }
}

pub(crate) fn a_loss_wakes_a_sleeper(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let mut sleeper = world.take(0);
    let dies = world.take(1);
    let thread = std::thread::spawn(move || drop(dies));
    sleep_until(sleeper.as_mut(), "a loss", |events| {
        events.iter().any(|event| matches!(event, Event::PeerLost { peer: 1, .. }))
    });
    thread.join().expect("dropping a device does not panic");
}

pub(crate) fn a_bye_wakes_a_sleeper(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let mut sleeper = world.take(0);
    let companion = Companion::start(world.take(1), |device, round| {
        if round == 20 {
            device.leave();
        }
    });
    sleep_until(sleeper.as_mut(), "a bye", |events| events.contains(&Event::Departed { peer: 1 }));
    companion.finish();
}

pub(crate) fn a_fence_wakes_a_sleeper(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let mut sleeper = world.take(0);
    let companion = Companion::start(world.take(1), |_, _| {});
    sleeper.sever(1);
    sleep_until(sleeper.as_mut(), "the fence", |events| events.contains(&Event::Severed { peer: 1 }));
    companion.finish();
}

pub(crate) fn a_drain_wakes_a_sleeper(backend: BackendKind) {
    const DRAINS: usize = 20;
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region(0, backend.long_bytes), world.region(1, backend.long_bytes));
    let mut sleeper = world.take(0);
    let (asks, asked) = channel();
    let companion = Companion::start(world.take(1), move |device, _| {
        if asked.try_recv().is_ok() {
            device.drain(0).expect("connected");
        }
    });
    let drained = Event::Drained { peer: 1 };
    let mut seen = 0;
    for round in 0..DRAINS {
        // Sometimes the sleeper's own transfer is the last to end, sometimes the peer drains last.
        let long = put(&source.whole(), target.remote(), Some(SIGNAL_SLOT));
        sleeper.submit(1, long, TransferId(round as u64)).expect("few under way");
        let asks_first = round % 2 == 0;
        if asks_first {
            asks.send(()).expect("the companion runs");
        }
        sleeper.drain(1).expect("connected");
        if !asks_first {
            asks.send(()).expect("the companion runs");
        }
        sleep_until(sleeper.as_mut(), "a drained pair", |events| {
            seen = events.iter().filter(|event| **event == drained).count();
            seen > 0
        });
        assert_eq!(seen, 1, "{}: one for one", backend.name);
    }
    companion.finish();
}

pub(crate) fn a_connection_wakes_a_sleeper(backend: BackendKind) {
    if !backend.live {
        return skip(backend, NO_THREADS);
    }
    let mut world = World::new(backend, 2);
    let addresses = [world.device(0).info().address.clone(), world.device(1).info().address.clone()];
    let mut sleeper = world.take(0);
    let theirs = addresses[0].clone();
    let companion = Companion::start(world.take(1), move |device, round| {
        if round == 20 {
            device.connect(0, &theirs).expect("connecting starts");
        }
    });
    sleeper.connect(1, &addresses[1]).expect("connecting starts");
    let connected = Event::Connected { peer: 1 };
    sleep_until(sleeper.as_mut(), "a connection", |events| events.contains(&connected));
    companion.finish();
}
