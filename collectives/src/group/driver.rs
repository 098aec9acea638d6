//! One engine, many threads: a thread that waits for a run drives all runs.
//!
//! The engine is behind one lock, uncontended in the common case of one calling thread. A driver
//! checks once a round whether another thread wants the lock ([`Driver::lock`]), and then releases
//! it. A wait has these phases: poll without a pause, poll with yields, then arm the device's wake
//! source, poll once more and sleep. Every wait has a deadline, the run's own.
//!
//! A yield is the quickest way to let a peer on the same processor run. It is the slowest way where
//! other programs want the processor too: the kernel then gives them a turn of milliseconds. So
//! after a yield that took that long there are no yields for a while. Ranks that share processors
//! sleep instead, others poll on.
//!
//! Ranks that have a processor each may still come to be on one processor, and stay there: the
//! kernel moves no thread that only yields. So a waiting rank shows its processor to the peers that
//! map its memory ([`Driver::is_beside_peer`]). A rank that has yielded beside a peer some times
//! sleeps instead, as the kernel wakes a thread on an idle processor. Where that does not separate
//! the two ranks, because all processors are busy, the higher rank moves itself to another
//! processor.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::processors::{Processors, current, move_away_from};
use pleach_transport::{Nanos, Wake, clock, fork, sleep};

use super::error::CollectiveError;
use super::observed::Observed;
use super::planner::Planner;
use super::unwinding::{NoUnwinding, without_unwinding};
use crate::engine::{Engine, Fault, RunId, StatusBoard};
use crate::partial::{Rounds, Seen};
use crate::window::OneSided;

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;
/// Polls of signals before the device and the clock are polled: some microseconds.
const SIGNAL_POLLS: u32 = 16;
/// How long to poll before the first yield. A peer that is awake on a processor of its own answers
/// much sooner. A peer on this very processor can only answer after a yield.
const YIELD_AFTER: Duration = Duration::from_micros(2);
/// A yield that takes longer than this for each rank of the processor has given it to another
/// program: a peer works for some hundred microseconds at most before it yields or sleeps itself.
const TURN_MAX: Duration = Duration::from_millis(1);
/// After the first such yield, yields pause for this many times its duration. The pause doubles
/// each time that other programs run again soon after, up to [`WARY_MAX`]. So yields cost little
/// time beside any number of other programs, and are soon tried again after a program has ended.
/// During a pause, ranks that share processors sleep instead.
const WARY_TURNS: u32 = 2;
/// Longest time without yields.
const WARY_MAX: Duration = Duration::from_millis(500);
/// During such a pause, ranks with a processor each poll this many times longer before they sleep.
/// A rank that sleeps gets its processor back only when the other program's turn ends.
const WARY_SPINS: u32 = 20;
/// Yields beside a peer before this rank sleeps instead: some tens of microseconds.
const YIELDS_BESIDE: u32 = 4;
/// Sleeps beside a peer before the higher of the two ranks moves to another processor. The
/// scheduler moves a woken thread only to a processor that is idle at that moment.
const SLEEPS_BESIDE: u32 = 2;
/// The lower rank waits this many times as long before it moves itself: the higher rank moves
/// first, unless it is bound to that processor.
const LOWER_RANK_WAITS: u32 = 4;
/// Longest sleep, in case a wake source is missed by mistake.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// How long a thread that carries on in the background polls before it sleeps: its processor is the
/// caller's.
const BACKGROUND_SPIN: Duration = Duration::from_micros(20);

/// How long that thread stays away after it has given the lock to a call, before it looks what the
/// caller does. While the caller makes one call after the other the thread stays away twice as long
/// each time, up to a limit. So a caller that hardly computes is hardly disturbed. A caller whose
/// calls end just after a look is alone for the rest of one such time and for the next one, so for
/// twice the limit at most.
const AWAY_MIN: Duration = Duration::from_micros(50);
const AWAY_MAX: Duration = Duration::from_micros(400);

/// The limit for rounds of a partial all-reduce, which may take a microsecond. To wake the thread
/// takes a rank's processor for some tens of them, while all other ranks wait for that rank. Where
/// rounds open some time after a rank is ready, that time is the limit if it is shorter.
const AWAY_FROM_ROUNDS_MAX: Duration = Duration::from_micros(3200);

/// The limit while nothing can happen before the caller's next call. On the wake source of the
/// device the thread would be woken by peers that are ready earlier. It looks from time to time all
/// the same: an abort is to be known everywhere within 100 ms.
const AWAY_FROM_WAITING_MAX: Duration = Duration::from_millis(25);

/// If the caller is in one long call, the thread looks again after this part of its time away so
/// far, within the same limits.
const AWAY_SHARE: u32 = 8;

/// The time for which the background thread is away from a caller; see [`Driver::stay_away`].
struct TimeAway {
    begin: Nanos,
    /// Until the next look.
    time: Duration,
    max: Duration,
}

impl TimeAway {
    fn begin(now: Nanos, max: Duration) -> Self {
        Self { begin: now, time: AWAY_MIN, max }
    }

    /// The thread stays away. `waits`: how often the caller has waited since the last look.
    fn go_on(&mut self, waits: u32, now: Nanos) {
        let time = if makes_calls(waits) { self.time * 2 } else { now.since(self.begin) / AWAY_SHARE };
        self.time = time.clamp(AWAY_MIN, self.max);
    }

    /// The thread goes away again, after a look at which nothing had happened.
    fn again(self, max: Duration) -> Self {
        Self { time: (self.time * 2).clamp(AWAY_MIN, max), max, ..self }
    }
}

/// Whether a caller that has waited so often makes one call after the other. Of one wait nobody
/// knows what comes after it: the caller may compute.
fn makes_calls(waits: u32) -> bool {
    waits > 1
}

/// For how long a call that waits goes on with the active round alone, and says nothing to other
/// ranks, where rounds need no words. Words take time from the ranks of the same processor.
const WITHOUT_WORDS: Duration = Duration::from_micros(50);

/// Longest time that a finished call waits until its last signals and messages have gone out. Only
/// peers that do not read take longer; the rest then goes out with the next call.
pub(crate) const FLUSH_TIME_MAX: Duration = Duration::from_secs(1);

/// How often a call that waits asks whether it was interrupted.
pub(crate) const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// Longest time that an abort takes; only an abort whose peers do not answer takes so long.
const ABORT_TIME_MAX: Duration = Duration::from_secs(1);

/// What the lock guards.
pub(super) struct Core {
    pub(super) engine: Engine,
    pub(super) planner: Planner,
    /// What else the group does.
    pub(crate) served: Option<Served>,
}

/// What a group of its own does beside calls.
pub(crate) enum Served {
    /// The rounds of a partial all-reduce.
    Rounds(Box<Rounds>),
    /// A window.
    Window(Box<OneSided>),
}

impl Served {
    fn poll(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        match self {
            Self::Rounds(rounds) => rounds.poll(engine, now),
            Self::Window(window) => window.poll(engine, now),
        }
    }

    /// A poll soon after another one, which costs less: rounds go on with the active one alone.
    fn poll_again(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        let is_polled = match self {
            Self::Rounds(rounds) => rounds.poll_active(engine),
            Self::Window(_) => false,
        };
        !is_polled && self.poll(engine, now)
    }

    /// The same before this rank sleeps: true also when a signal has come that its caller waits
    /// for.
    fn poll_before_sleep(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        let has_come = matches!(self, Self::Window(window) if window.has_come());
        self.poll(engine, now) | has_come
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        match self {
            Self::Rounds(rounds) => rounds.next_wakeup(),
            Self::Window(window) => window.next_wakeup(),
        }
    }

    /// Whether a poll that moves something may copy or compute for long.
    fn polls_take_long(&self) -> bool {
        match self {
            Self::Rounds(rounds) => rounds.polls_take_long(),
            Self::Window(_) => true,
        }
    }

    /// How long the background thread may stay away from a caller between two looks.
    fn away_max(&self) -> Duration {
        match self {
            Self::Rounds(rounds) => rounds.grace().clamp(AWAY_MAX, AWAY_FROM_ROUNDS_MAX),
            Self::Window(_) => AWAY_MAX,
        }
    }

    /// Whether nothing can happen before the caller makes a call.
    fn waits_for_caller(&self) -> bool {
        match self {
            Self::Rounds(rounds) => rounds.wait_for_caller(),
            Self::Window(_) => false,
        }
    }

    /// For how long polls of a caller may cost less: see [`Served::poll_again`].
    fn polls_less_for(&self) -> Duration {
        match self {
            Self::Rounds(rounds) if rounds.need_no_words() => WITHOUT_WORDS,
            Self::Rounds(_) | Self::Window(_) => Duration::ZERO,
        }
    }

    /// Whether this rank has to poll though its caller is in no call.
    fn is_under_way(&self) -> bool {
        match self {
            Self::Rounds(_) => true,
            Self::Window(window) => window.is_under_way(),
        }
    }
}

pub(super) struct Driver {
    core: Mutex<Core>,
    /// Waits of callers since the background thread looked last. Relaxed: counted with the lock
    /// held, and taken without it. A count that comes back makes one time away longer, no more.
    waits: AtomicU32,
    /// Threads of callers that want the lock. Relaxed: only a hint to the driver; the lock orders
    /// everything else.
    waiting: AtomicUsize,
    board: Arc<StatusBoard>,
    waker: Arc<dyn Wake>,
    /// The process whose engine this is.
    process: fork::Process,
    /// How long to poll before the first sleep.
    spin: Duration,
    /// Ranks that take turns on this processor. Where they are several, polling without yields only
    /// delays the others.
    ranks_a_processor: u32,
    /// Until when waits do not yield, in nanoseconds of the clock: other programs want this
    /// processor, and a rank that yields to them runs again only after their turns. Relaxed: a
    /// hint, of the thread that waited last.
    wary_until: AtomicU64,
    /// How long the current or last time without yields is, in nanoseconds. Relaxed: as above.
    wary_for_ns: AtomicU64,
    /// Whether there are peers that show on which processor they wait.
    has_neighbours: bool,
    /// How often in a row this rank was about to yield or sleep and found a peer on its processor.
    /// Relaxed: a hint, as above.
    times_beside: AtomicU32,
    observed: Observed,
}

impl Core {
    #[inline]
    pub(crate) fn poll(&mut self, now: Nanos) -> bool {
        let moved = self.engine.poll(now);
        match &mut self.served {
            None => moved,
            Some(served) => served.poll(&mut self.engine, now) | moved,
        }
    }

    /// A poll soon after another one, which costs less.
    #[inline]
    fn poll_again(&mut self, now: Nanos) -> bool {
        let moved = self.engine.poll(now);
        match &mut self.served {
            None => moved,
            Some(served) => served.poll_again(&mut self.engine, now) | moved,
        }
    }

    /// The poll between arming the device's wake source and sleeping on it.
    fn poll_before_sleep(&mut self, now: Nanos) -> bool {
        let moved = self.engine.poll_before_sleep(now);
        match &mut self.served {
            None => moved,
            Some(served) => served.poll_before_sleep(&mut self.engine, now) | moved,
        }
    }

    /// Whether a poll that moves something may take long: other threads, and the time, are
    /// looked at before the next one.
    fn polls_take_long(&self) -> bool {
        self.served.as_ref().is_some_and(Served::polls_take_long)
    }

    /// Whether nothing can happen before the caller makes a call, and peers need no poll of this
    /// rank's device.
    fn waits_for_caller(&mut self) -> bool {
        let Self { engine, served, .. } = self;
        engine.is_passive()
            && engine.works()
            && !engine.is_connecting()
            && served.as_ref().is_some_and(Served::waits_for_caller)
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let served = self.served.as_ref().and_then(Served::next_wakeup);
        self.engine.next_wakeup().into_iter().chain(served).min()
    }

    /// The rounds of a group that serves a partial all-reduce.
    pub(crate) fn expect_rounds(&mut self) -> &mut Rounds {
        let Some(Served::Rounds(rounds)) = &mut self.served else {
            unreachable!("the group of a partial all-reduce has rounds")
        };
        rounds
    }

    /// The window of a group that has one, and the engine.
    pub(crate) fn expect_window(&mut self) -> (&mut OneSided, &mut Engine) {
        let Some(Served::Window(window)) = &mut self.served else {
            unreachable!("the group of a window has it")
        };
        (window, &mut self.engine)
    }

    /// The caller, which waits for its round, has it carried out by its own thread.
    pub(crate) fn begin_round(&mut self) {
        let Some(Served::Rounds(rounds)) = &mut self.served else { return };
        without_unwinding(|| rounds.begin(&mut self.engine));
    }

    /// The round that the caller waits for, once it has ended.
    pub(crate) fn take_round(&mut self) -> Option<Seen> {
        self.expect_rounds().take_ended()
    }

    /// Tells the engine the time, for the few calls that are timed although they do not wait.
    pub(super) fn begin_time(&mut self) {
        let now = self.engine.wants_time().then(clock::now);
        self.engine.begin_time(now);
    }

    /// The same at the end of a call.
    pub(super) fn end_time(&mut self) {
        if self.engine.wants_end_time() {
            self.engine.end_time(clock::now());
        }
    }
}

impl Driver {
    pub(super) fn new(
        engine: Engine,
        planner: Planner,
        board: Arc<StatusBoard>,
        world_size: u32,
        spin: Duration,
        ranks_a_processor: u32,
        observed: Observed,
    ) -> Self {
        let mut core = Core { engine, planner, served: None };
        let waker = Arc::clone(&core.engine.device().info().waker);
        let process = fork::Process::current();
        let info = core.engine.device().info();
        // Peers show their processors only to ranks that map their memory.
        let has_neighbours = (0..world_size).any(|peer| peer != info.rank && info.reach[peer as usize].maps);
        Self {
            core: Mutex::new(core),
            waits: AtomicU32::new(0),
            waiting: AtomicUsize::new(0),
            board,
            waker,
            process,
            spin: spin.saturating_mul(ranks_a_processor.max(1)),
            ranks_a_processor: ranks_a_processor.max(1),
            wary_until: AtomicU64::new(0),
            wary_for_ns: AtomicU64::new(0),
            has_neighbours,
            times_beside: AtomicU32::new(0),
            observed,
        }
    }

    /// Whether other ranks need this rank's processor.
    #[inline]
    fn is_crowded(&self) -> bool {
        self.ranks_a_processor > 1
    }

    /// An error in a forked child, whose parent has the group. To be asked before the lock is
    /// taken: another thread may have held it when the process forked.
    #[inline]
    pub(super) fn expect_own_process(&self) -> Result<(), CollectiveError> {
        if self.is_own_process() {
            return Ok(());
        }
        Err(CollectiveError::Forked { owner: self.process.id() })
    }

    /// Whether this process has made the group, and not one that it was forked from.
    #[inline]
    pub(super) fn is_own_process(&self) -> bool {
        self.process.is_current()
    }

    /// Lets small calls take the short way, once all ranks are ready.
    pub(super) fn enable_fast_path(&self) {
        self.lock().engine.enable_fast_path(self.is_crowded());
    }

    /// The status board of the engine.
    pub(crate) fn board(&self) -> &StatusBoard {
        &self.board
    }

    /// What is known of the group's calls.
    pub(super) fn observed(&self) -> &Observed {
        &self.observed
    }

    /// Engine and planner, for a short time.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        if let Ok(core) = self.core.try_lock() {
            return core;
        }
        self.wait_for_lock()
    }

    /// The same, if no other thread has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Core>> {
        self.core.try_lock().ok()
    }

    #[cold]
    fn wait_for_lock(&self) -> MutexGuard<'_, Core> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // The driver may be asleep with the lock.
        self.waker.wake();
        let core = lock(&self.core);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        core
    }

    /// Ends the group, and drives the engine until the peers have been told: no other thread may
    /// drive the engine for a long time.
    pub(super) fn abort(&self) {
        self.board.abort();
        self.waker.wake();
        let until = clock::now() + ABORT_TIME_MAX;
        self.drive(self.lock(), until, |engine| engine.has_told_failure().then_some(()));
    }

    /// See [`super::Group::completed`].
    pub(super) fn completed(&self) -> u64 {
        self.board.completed_collectives()
    }

    /// Drives the engine until `look` returns a value, or `until` has passed.
    #[inline]
    pub(super) fn drive<'a, T>(
        &'a self,
        core: MutexGuard<'a, Core>,
        until: Nanos,
        mut look: impl FnMut(&mut Engine) -> Option<T>,
    ) -> Option<T> {
        self.drive_core(core, until, |core| look(&mut core.engine))
    }

    /// As [`Driver::drive`], where `look` sees more than the engine.
    pub(crate) fn drive_core<'a, T>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        until: Nanos,
        mut look: impl FnMut(&mut Core) -> Option<T>,
    ) -> Option<T> {
        let _whole = NoUnwinding::new();
        self.count_wait();
        let mut now = clock::now();
        let mut idle_since = now;
        let less_until = now + core.served.as_ref().map_or(Duration::ZERO, Served::polls_less_for);
        let polls = if self.is_crowded() { 1 } else { POLLS_PER_CLOCK };
        if self.has_neighbours {
            core.engine.device().exchange_processors(current(), &mut |_, _| {});
        }
        loop {
            let mut moved = false;
            for poll in 0..polls {
                let is_again = poll > 0 || now < less_until;
                let moves = if is_again { core.poll_again(now) } else { core.poll(now) };
                moved |= moves;
                if let Some(found) = look(&mut core) {
                    return Some(found);
                }
                if moves && core.polls_take_long() {
                    break;
                }
                std::hint::spin_loop();
            }
            now = clock::now();
            if now >= until {
                return None;
            }
            if moved {
                idle_since = now;
            }
            let idle = now.since(idle_since);
            if self.waiting.load(Ordering::Relaxed) > 0 {
                // Two threads call at once: the call of this thread may wait for a call that the
                // other thread is about to make.
                core.engine.allow_concurrent_calls(true);
                drop(core);
                std::thread::yield_now();
                core = self.lock();
                continue;
            }
            let is_wary = now.0 < self.wary_until.load(Ordering::Relaxed);
            // The fence is this rank's own work. A yield would delay it by a turn of every other
            // thread.
            let may_give_way = !core.engine.is_severing() && (self.is_crowded() || idle > YIELD_AFTER);
            let spin = match (is_wary, self.is_crowded()) {
                (false, _) => self.spin,
                (true, false) => self.spin.saturating_mul(WARY_SPINS),
                (true, true) => Duration::ZERO,
            };
            // Yields to a peer are short unless another program wants the processor too.
            let yields = if is_wary { 0 } else { YIELDS_BESIDE };
            let must_part = may_give_way && self.is_beside_peer(&mut core.engine, yields);
            if must_part || (idle >= spin && (may_give_way || idle >= self.spin)) {
                let moved;
                (now, moved) = sleep(&mut core, now, until);
                if moved {
                    idle_since = now;
                }
            } else if may_give_way && !is_wary {
                self.give_way(now);
            }
        }
    }

    /// Shows on which processor this rank waits, and returns whether a peer has waited on the same
    /// processor for more than `yields`.
    ///
    /// The processor that a peer shows is out of date if the peer has moved and not waited since,
    /// and it may be a lie. Then this rank does one of two harmless things. It sleeps without need,
    /// until the peer wakes it and shows its present processor; or it moves once.
    fn is_beside_peer(&self, engine: &mut Engine, yields: u32) -> bool {
        if self.is_crowded() || !self.has_neighbours {
            return false;
        }
        let (here, device) = (current(), engine.device());
        let mut beside = None;
        device.exchange_processors(here, &mut |peer, processor| {
            if processor == here {
                beside.get_or_insert(peer);
            }
        });
        let Some(lowest) = beside else {
            self.times_beside.store(0, Ordering::Relaxed);
            return false;
        };
        let times = self.times_beside.load(Ordering::Relaxed);
        self.times_beside.store(times.saturating_add(1), Ordering::Relaxed);
        let patience = if lowest < device.info().rank { 1 } else { LOWER_RANK_WAITS };
        if times >= patience * (YIELDS_BESIDE + SLEEPS_BESIDE) {
            self.times_beside.store(0, Ordering::Relaxed);
            let mut shown = Vec::new();
            device.exchange_processors(here, &mut |_, processor| shown.push(processor));
            // If there is no other processor, both ranks go on as before.
            if move_away_from(&Processors::new(shown)) {
                device.exchange_processors(current(), &mut |_, _| {});
                return false;
            }
        }
        times >= yields
    }

    /// Yields the processor. A yield that takes long shows that other programs ran, not only peers.
    fn give_way(&self, now: Nanos) {
        std::thread::yield_now();
        let back = clock::now();
        let away = back.since(now);
        if away > TURN_MAX * self.ranks_a_processor {
            let ended = Nanos(self.wary_until.load(Ordering::Relaxed));
            let before = Duration::from_nanos(self.wary_for_ns.load(Ordering::Relaxed));
            let wary_for = wary_for(away, now.since(ended), before);
            self.wary_for_ns.store(wary_for.as_nanos() as u64, Ordering::Relaxed);
            self.wary_until.store((back + wary_for).0, Ordering::Relaxed);
        }
    }

    /// Drives the engine until nothing is under way, and releases the lock for every call. For a
    /// thread that makes no calls, which is unparked when a caller has set `has_work` or `is_over`
    /// (release; acquire here: the thread finds what was started). Rounds of a partial all-reduce
    /// are always under way, and so are a window whose peers need polls of this rank and a
    /// connection that a peer waits for.
    pub(super) fn carry_on(&self, has_work: &AtomicBool, is_over: &AtomicBool) {
        let _whole = NoUnwinding::new();
        let mut core = lock(&self.core);
        let mut now = clock::now();
        let mut idle_since = now;
        let mut time_away = None;
        while !is_over.load(Ordering::Acquire) {
            let moved = core.poll(now);
            let serves = core.served.as_ref().is_some_and(Served::is_under_way);
            let engine = &mut core.engine;
            if engine.failure().is_some()
                || (engine.is_idle() && engine.flush() && !serves && !engine.is_connecting())
            {
                return;
            }
            now = clock::now();
            if moved {
                idle_since = now;
            }
            if self.waiting.load(Ordering::Relaxed) > 0 || core.waits_for_caller() {
                core = self.stay_away(core, &mut time_away, has_work, is_over);
                now = clock::now();
                continue;
            }
            time_away = None;
            if now.since(idle_since) < BACKGROUND_SPIN || core.engine.is_severing() {
                std::thread::yield_now();
            } else {
                let moved;
                (now, moved) = sleep(&mut core, now, Nanos::MAX);
                if moved {
                    idle_since = now;
                }
            }
        }
    }

    /// Gives the lock to callers, and takes it again once they compute: a call that has the lock
    /// drives everything itself. Taking it between two calls would cost each of them a wake-up and
    /// a wait. So a look never waits for the lock. `before`: the last time away, if the thread has
    /// found nothing to do since.
    fn stay_away<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        before: &mut Option<TimeAway>,
        has_work: &AtomicBool,
        is_over: &AtomicBool,
    ) -> MutexGuard<'a, Core> {
        self.waits.store(0, Ordering::Relaxed);
        let waits_for_caller = core.waits_for_caller();
        let max = match &core.served {
            _ if waits_for_caller => AWAY_FROM_WAITING_MAX,
            Some(served) => served.away_max(),
            None => AWAY_MAX,
        };
        drop(core);
        let mut away = match before.take() {
            Some(before) if waits_for_caller => before.again(max),
            _ => TimeAway::begin(clock::now(), max),
        };
        loop {
            thread::park_timeout(away.time);
            if has_work.swap(false, Ordering::Acquire) || is_over.load(Ordering::Acquire) {
                return lock(&self.core);
            }
            let waits = self.waits.swap(0, Ordering::Relaxed);
            if !makes_calls(waits)
                && let Some(core) = self.try_lock()
            {
                *before = Some(away);
                return core;
            }
            away.go_on(waits, clock::now());
        }
    }

    pub(super) fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }

    /// Drives the engine until the run's outcome is known; its own deadline ends it.
    ///
    /// Asks `interrupted` at intervals, and aborts the group if the answer is true.
    pub(super) fn finish<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        run: RunId,
        interrupted: Option<fn() -> bool>,
    ) -> Result<(), Arc<Fault>> {
        let is_done = core.engine.is_passive() && !self.is_crowded() && poll_signals(&mut core.engine, run);
        // No clock was read when the run ended; it may have ended when it was started.
        core.end_time();
        if is_done {
            return Ok(());
        }
        core.engine.await_run(run);
        if let Some(interrupted) = interrupted {
            loop {
                if let Some(outcome) = self.outcome(core, run, clock::now() + INTERRUPT_INTERVAL) {
                    return outcome;
                }
                if interrupted() {
                    self.abort();
                }
                core = self.lock();
            }
        }
        self.outcome(core, run, Nanos::MAX).expect("an unlimited drive ends with what it looks for")
    }

    /// The short way to the end of the round that this rank is bound to, without a system call;
    /// `None`: it takes longer.
    pub(crate) fn poll_round(&self, core: &mut Core) -> Option<Seen> {
        if !core.engine.is_passive() || self.is_crowded() {
            return None;
        }
        let _whole = NoUnwinding::new();
        for _ in 0..SIGNAL_POLLS {
            let Some(Served::Rounds(rounds)) = &mut core.served else { return None };
            if !rounds.poll_active(&mut core.engine) {
                return None;
            }
            if let Some(round) = rounds.take_ended() {
                // Over shared memory all has gone out then.
                core.engine.flush();
                self.count_wait();
                return Some(round);
            }
            core.engine.poll_signals(Nanos::ZERO);
        }
        None
    }

    /// Counts a wait of a caller, which has the lock.
    fn count_wait(&self) {
        self.waits.store(self.waits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Drives the engine until one of these runs has ended, well or not, or `until` has passed.
    pub(super) fn drive_until_any_ends(&self, runs: &[RunId], until: Nanos) {
        self.drive(self.lock(), until, |engine| {
            let has_ended = runs.iter().any(|run| engine.has_ended(*run));
            (has_ended || engine.failure().is_some()).then_some(())
        });
    }

    /// Waits until no peer can touch this rank's memory any more, before a call is refused because
    /// the group has failed. The wait is this rank's own work.
    pub(super) fn wait_fenced(&self, core: MutexGuard<'_, Core>, error: &CollectiveError, limit: Duration) {
        if matches!(error, CollectiveError::Failed(_)) && core.engine.failure().is_none() {
            self.drive(core, clock::now() + limit, |engine| engine.failure().map(|_| ()));
        }
        if matches!(error, CollectiveError::Failed(_)) {
            self.observed.failed();
        }
    }

    /// The run's outcome, if it is known before `until`. The signals of its last steps have gone
    /// out then: this rank may not poll for a long time after the call, and its peers wait for
    /// these signals.
    pub(super) fn outcome(
        &self,
        core: MutexGuard<'_, Core>,
        run: RunId,
        until: Nanos,
    ) -> Option<Result<(), Arc<Fault>>> {
        let (outcome, is_flushed) = self.drive(core, until, |engine| {
            let outcome = engine.take_outcome(run)?;
            Some((outcome, engine.flush()))
        })?;
        if outcome.is_ok() && !is_flushed {
            self.drive(self.lock(), clock::now() + FLUSH_TIME_MAX, |engine| {
                (engine.flush() || engine.failure().is_some()).then_some(())
            });
        }
        if outcome.is_err() {
            self.observed.failed();
        }
        Some(outcome)
    }
}

/// How long not to yield after a yield that took `away`. The last time without yields was `before`
/// long, and ended `calm` ago.
fn wary_for(away: Duration, calm: Duration, before: Duration) -> Duration {
    let once = away * WARY_TURNS;
    if calm < before { once.max(before * 2).min(WARY_MAX) } else { once.min(WARY_MAX) }
}

/// The short way, without a system call. Returns true when the run has ended well and nothing is
/// left to be done for it.
fn poll_signals(engine: &mut Engine, run: RunId) -> bool {
    for _ in 0..SIGNAL_POLLS {
        if engine.has_ended(run) {
            return engine.flush() && matches!(engine.take_outcome(run), Some(Ok(())));
        }
        engine.poll_signals(Nanos::ZERO);
    }
    false
}

/// Sleeps until something can happen. Returns the time afterwards, and whether the poll before the
/// sleep has moved anything.
fn sleep(core: &mut Core, now: Nanos, until: Nanos) -> (Nanos, bool) {
    let limit = |core: &Core| {
        let wake_at = core.next_wakeup().unwrap_or(Nanos::MAX).min(until);
        wake_at.since(now).min(SLEEP_MAX)
    };
    let mut moved = false;
    if !limit(core).is_zero() {
        let look = |core: &mut Core| {
            moved = core.poll_before_sleep(now);
            moved
        };
        sleep::unless_ready(
            core,
            |core| core.engine.device().arm(),
            look,
            |core, armed| {
                // The look may have set a time.
                armed.wait(now, limit(core));
            },
        );
    }
    (clock::now(), moved)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use pleach_transport::rendezvous::Fabric;

    use super::*;
    use crate::{Group, ranks};

    /// Longest time that a test waits for another thread.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn the_background_thread_stays_away_longer_while_its_caller_makes_one_call_after_the_other() {
        let mut away = TimeAway::begin(Nanos::ZERO, AWAY_MAX);
        let mut times = vec![away.time];
        for waits in [2, 3, 1000, 2, u32::MAX] {
            away.go_on(waits, Nanos::ZERO);
            times.push(away.time);
        }
        assert!(times.is_sorted_by(|one, next| *next == (*one * 2).min(AWAY_MAX)), "{times:?}");
        assert_eq!((times[0], times[times.len() - 1]), (AWAY_MIN, AWAY_MAX));
        assert!(makes_calls(2) && !makes_calls(1) && !makes_calls(0));
    }

    #[test]
    fn the_background_thread_is_back_soon_after_one_call_however_long() {
        let mut away = TimeAway::begin(Nanos::ZERO, AWAY_FROM_ROUNDS_MAX);
        for (waits, after_us, time_us) in
            [(1, 100, 50), (0, 4_000, 500), (0, 8_000, 1_000), (0, 90_000, 3_200)]
        {
            away.go_on(waits, Nanos(after_us * 1000));
            assert_eq!(away.time, Duration::from_micros(time_us), "after {after_us} us");
        }
    }

    /// A thread stays away from this caller, which goes on with what `call` does until the thread
    /// is back. Whether it came back in time.
    fn comes_back(has_work: &AtomicBool, is_over: &AtomicBool, call: impl Fn(&Driver) + Sync) -> bool {
        let body = |group: Group| {
            let (driver, is_back) = (group.shared.driver.clone(), AtomicBool::new(false));
            thread::scope(|scope| {
                let (driver, is_back) = (&driver, &is_back);
                scope.spawn(move || {
                    drop(driver.stay_away(lock(&driver.core), &mut None, has_work, is_over));
                    is_back.store(true, Ordering::Release);
                });
                let until = clock::now() + PATIENCE;
                while !is_back.load(Ordering::Acquire) && clock::now() < until {
                    call(driver);
                    thread::yield_now();
                }
                is_back.load(Ordering::Acquire)
            })
        };
        ranks::with_group(Fabric::Shm, 1, |_| {}, body)[0]
    }

    /// What a caller does that makes one call after the other.
    fn call_twice(driver: &Driver) {
        let core = driver.lock();
        driver.count_wait();
        driver.count_wait();
        drop(core);
    }

    #[test]
    fn the_background_thread_comes_back_when_its_caller_computes() {
        let (no_work, not_over) = (AtomicBool::new(false), AtomicBool::new(false));
        assert!(comes_back(&no_work, &not_over, |_| {}));
    }

    #[test]
    fn the_background_thread_comes_back_after_many_calls() {
        let (no_work, not_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let calls_until = clock::now() + AWAY_FROM_ROUNDS_MAX * 4;
        assert!(comes_back(&no_work, &not_over, |driver| {
            if clock::now() < calls_until {
                call_twice(driver);
            }
        }));
    }

    #[test]
    fn the_background_thread_comes_back_for_work_though_its_caller_goes_on_calling() {
        let (has_work, is_over) = (AtomicBool::new(true), AtomicBool::new(false));
        assert!(comes_back(&has_work, &is_over, call_twice));
        assert!(!has_work.load(Ordering::Relaxed), "it has taken the work");
        is_over.store(true, Ordering::Release);
        assert!(comes_back(&has_work, &is_over, call_twice));
    }

    #[test]
    fn yields_are_tried_again_soon_after_one_stranger_and_seldom_among_many() {
        let millis = Duration::from_millis;
        let (turn, none) = (millis(4), Duration::ZERO);
        assert_eq!(wary_for(turn, millis(1000), none), millis(8));
        // A long yield after a long calm counts as a first one again.
        assert_eq!(wary_for(turn, millis(9), millis(8)), millis(8));
        let mut times = none;
        let mut lost = none;
        let mut all = none;
        for _ in 0..20 {
            times = wary_for(turn, none, times);
            lost += turn;
            all += turn + times;
        }
        assert_eq!(times, WARY_MAX);
        assert!(lost * 50 < all, "{lost:?} of {all:?} go to strangers who never leave");
        assert_eq!(wary_for(millis(10_000), none, none), WARY_MAX);
    }
}
