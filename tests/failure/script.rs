//! What a rank does that a test tells what to do: one command a line, one line of answer, every
//! result checked.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pleach::transport::clock::now;
use pleach::transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};
use pleach::window::{Window, Word};
use pleach::{Buffer, CollectiveError, DataMut, Element, Group, Operation, Options, Rank, ReduceOp};

use crate::children::{fork, hold, status};
use crate::ranks::{MARK, PATIENCE, TOLD, VARIABLE};

/// What a survivor writes over its memory.
const PATTERN: f32 = -123.5;

/// Elements of a registered buffer that no call uses, unless a test asks for more.
const IDLE_ELEMENTS: usize = 100_000;

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A test that does not listen any more has ended.
    let _ = writeln!(out, "{MARK}{}", line.replace('\n', " ")).and_then(|()| out.flush());
}

/// One rank of a job, as its variable says; nothing where there is none.
pub(crate) fn obey() {
    let Ok(variable) = std::env::var(VARIABLE) else { return };
    let words: Vec<_> = variable.splitn(4, ' ').collect();
    let number = |index: usize| words[index].parse::<Rank>().expect("is a number");
    let Ok(FabricChoice::Only(fabric)) = words[2].parse() else { panic!("{} is no fabric", words[2]) };
    let current = Arc::new(Mutex::new(None));
    let mut player = Player {
        rank: number(0),
        count: number(1),
        fabric,
        folder: PathBuf::from(words[3]),
        commands: listen(current.clone()),
        current,
        group: None,
        kept: None,
        window: None,
    };
    while let Ok(line) = player.commands.recv() {
        if line == "quit" {
            return;
        }
        player.obey(&line);
    }
}

/// Reads commands; carries out "abort" itself, while the rank is in a call. Ends the process with
/// the test.
fn listen(current: Arc<Mutex<Option<Group>>>) -> Receiver<String> {
    let (sender, commands) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if line == "abort" {
                let group: Option<Group> = current.lock().expect("is not poisoned").clone();
                group.expect("has joined").abort();
            } else if sender.send(line).is_err() {
                return;
            }
        }
        std::process::exit(1);
    });
    commands
}

/// Memory that outlives calls.
struct Kept {
    used: Memory,
    idle: Buffer<f32>,
}

enum Memory {
    Buffer(Buffer<f32>),
    Private(Vec<f32>),
}

impl Memory {
    fn elements(&mut self) -> &mut [f32] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Private(private) => private,
        }
    }
}

struct Player {
    rank: Rank,
    count: Rank,
    fabric: Fabric,
    folder: PathBuf,
    commands: Receiver<String>,
    /// For "abort".
    current: Arc<Mutex<Option<Group>>>,
    group: Option<Group>,
    kept: Option<Kept>,
    window: Option<Window<f32>>,
}

/// What a call is asked for, with what the rest of the line says.
struct Asked {
    operation: String,
    elements: usize,
    /// Of memory that is kept and used by no call.
    idle: usize,
    op: ReduceOp,
    root: Rank,
    group: Group,
}

impl Player {
    fn obey(&mut self, line: &str) {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        match command {
            "join" => {
                self.join(self.folder.clone());
                say("joined");
            }
            "call" => self.call(rest),
            "keep" => self.keep(rest),
            "window" => self.make_window(rest),
            "read" | "write" => self.use_window(command, rest.parse().expect("is a rank")),
            "loop" => self.repeat(rest),
            "fill" => {
                let kept = self.kept.as_mut().expect("was kept");
                fill(kept.used.elements(), &[PATTERN]);
                fill(&mut kept.idle, &[PATTERN]);
                say("filled");
            }
            "check" => self.check(),
            "close" => {
                self.current.lock().expect("is not poisoned").take();
                let begun = now();
                let group = self.group.take().expect("has joined");
                let result = group.close();
                tell(begun, result);
            }
            "drop" => {
                self.current.lock().expect("is not poisoned").take();
                drop(self.group.take());
                say("dropped");
            }
            "exit" => std::process::exit(0),
            "panic" => {
                self.current.lock().expect("is not poisoned").take();
                panic!("as it was told");
            }
            "fork-holding" => say(&fork(hold).as_raw_nonzero().to_string()),
            "fork-using" => self.fork_using(),
            "overlap" => self.overlap(rest),
            "rejoin" => self.rejoin(rest.parse().expect("is a number")),
            _ => panic!("unknown command: {line}"),
        }
    }

    fn join(&mut self, folder: PathBuf) {
        let mut options = Options::new(World {
            rank: self.rank,
            world_size: self.count,
            local_rank: Some(self.rank),
            rendezvous: Some(Rendezvous::File { folder }),
            host: (self.fabric == Fabric::Hybrid).then(|| format!("host-{}", self.rank % 2)),
            launcher: Launcher::Arguments,
            ..World::alone()
        });
        options.fabric = FabricChoice::Only(self.fabric);
        options.timeout = PATIENCE;
        options.join_timeout = PATIENCE;
        let group = Group::join(&options).unwrap_or_else(|error| panic!("rank {}: {error}", self.rank));
        *self.current.lock().expect("is not poisoned") = Some(group.clone());
        self.group = Some(group);
    }

    fn asked(&self, line: &str) -> (Asked, bool, bool) {
        let mut words = line.split(' ');
        let operation = words.next().expect("is named").to_owned();
        let group = self.group.clone().expect("has joined");
        let mut asked =
            Asked { operation, elements: 4, idle: IDLE_ELEMENTS, op: ReduceOp::Sum, root: 0, group };
        let (mut is_integer, mut is_private) = (false, false);
        for word in words {
            let (name, value) = word.split_once('=').expect("has a value");
            let number = || value.parse::<u64>().expect("is a number");
            match name {
                "count" => asked.elements = number() as usize,
                "idle" => asked.idle = number() as usize,
                "op" => asked.op = if value == "max" { ReduceOp::Max } else { ReduceOp::Sum },
                "root" | "peer" => asked.root = number() as Rank,
                "type" => is_integer = value == "i32",
                "memory" => is_private = value == "private",
                "within" => asked.group = asked.group.within(Duration::from_millis(number())),
                _ => panic!("unknown: {word}"),
            }
        }
        (asked, is_integer, is_private)
    }

    /// One call on new memory.
    fn call(&mut self, line: &str) {
        let (asked, is_integer, is_private) = self.asked(line);
        let begun;
        let result = if is_integer {
            let mut data = vec![0i32; asked.elements];
            begin(&mut data, self.rank, &asked);
            begun = now();
            perform(&asked, self, &mut data)
        } else if is_private {
            let mut data = vec![0f32; asked.elements];
            begin(&mut data, self.rank, &asked);
            begun = now();
            perform(&asked, self, &mut data)
        } else {
            match asked.group.buffer::<f32>(asked.elements) {
                Ok(mut data) => {
                    begin(&mut data, self.rank, &asked);
                    begun = now();
                    perform(&asked, self, &mut data)
                }
                Err(error) => {
                    begun = now();
                    Err(error)
                }
            }
        };
        tell(begun, result);
    }

    /// Makes memory for the calls to come.
    fn keep(&mut self, line: &str) {
        let (asked, _, is_private) = self.asked(line);
        let mut used = if is_private {
            Memory::Private(vec![0.0; asked.elements])
        } else {
            Memory::Buffer(asked.group.buffer(asked.elements).expect("there is memory"))
        };
        begin(used.elements(), self.rank, &asked);
        let idle = asked.group.buffer(asked.idle).expect("there is memory");
        self.kept = Some(Kept { used, idle });
        say("kept");
    }

    /// The same all-reduce again and again until it fails, on kept memory if there is some; its
    /// maximum is a result that stays.
    fn repeat(&mut self, line: &str) {
        let (asked, _, _) = self.asked(line);
        if self.kept.is_none() {
            let used = Memory::Buffer(asked.group.buffer(asked.elements).expect("there is memory"));
            let idle = asked.group.buffer(0).expect("there is memory");
            self.kept = Some(Kept { used, idle });
        }
        let mut kept = self.kept.take().expect("is there");
        begin(kept.used.elements(), self.rank, &asked);
        let mut is_first = true;
        loop {
            let begun = now();
            let result = match &mut kept.used {
                Memory::Buffer(buffer) => asked.group.all_reduce(buffer, ReduceOp::Max),
                Memory::Private(private) => asked.group.all_reduce(private, ReduceOp::Max),
            };
            if result.is_err() {
                tell(begun, result);
                break;
            }
            if is_first {
                is_first = false;
                let highest = u64::from(self.count);
                expect(kept.used.elements(), |index| highest + ripple(index));
                say("begun");
            }
        }
        self.kept = Some(kept);
    }

    /// Makes a window and publishes once.
    fn make_window(&mut self, line: &str) {
        let (asked, _, _) = self.asked(&format!("window {line}"));
        let mut window = asked.group.window::<f32>(asked.elements, 1).expect("all ask for the same");
        window.publish(&vec![self.rank as f32; asked.elements], Word::from(7)).expect("nothing fails");
        asked.group.barrier().expect("nothing fails");
        self.window = Some(window);
        say("made");
    }

    /// Reads a rank's elements again and again until that fails, or writes into its slot.
    fn use_window(&mut self, command: &str, peer: Rank) {
        let window = self.window.as_mut().expect("was made");
        let len = window.len();
        let mut elements = vec![0.0; len];
        let mut is_first = true;
        loop {
            let begun = now();
            let result = if command == "read" {
                window.read(peer, 0..len, &mut elements).map(|(version, word)| {
                    assert_eq!((version, word.number()), (1, 7));
                    assert_eq!(first_difference(&elements, &[peer as f32]), None);
                })
            } else {
                window.write(peer, 0, &elements, Word::EMPTY)
            };
            if result.is_err() {
                tell(begun, result);
                fill(&mut elements, &[PATTERN]);
                assert_eq!(self.commands.recv().as_deref(), Ok("check"));
                assert_eq!(first_difference(&elements, &[PATTERN]), None, "nothing comes later");
                return say("unchanged");
            }
            if std::mem::take(&mut is_first) {
                say("begun");
            }
        }
    }

    fn check(&mut self) {
        let kept = self.kept.as_mut().expect("was kept");
        for (name, elements) in [("used", kept.used.elements()), ("idle", &mut *kept.idle)] {
            if let Some(index) = first_difference(elements, &[PATTERN]) {
                say(&format!("element {index} of the {name} memory has become {}", elements[index]));
                return;
            }
        }
        say("unchanged");
    }

    /// A forked child in which everything refuses, and which harms nobody when it ends as programs
    /// do.
    fn fork_using(&mut self) {
        self.current.lock().expect("is not poisoned").take();
        let group = self.group.take().expect("has joined");
        let buffer = group.buffer::<f32>(1000).expect("there is memory");
        let sender = (self.rank + 1) % self.count;
        let pending = group.start(Operation::recv(vec![0f32; 3], sender)).expect("is accepted");
        let parent = (group, buffer, pending);
        let parent = std::cell::Cell::new(Some(parent));
        let child = fork(|| {
            let (group, mut buffer, pending) = parent.take().expect("is there");
            let is_refused = |result: Result<(), CollectiveError>| matches!(result, Err(CollectiveError::Forked { owner }) if owner != std::process::id());
            let refused = [
                is_refused(group.barrier()),
                is_refused(group.all_reduce(&mut buffer, ReduceOp::Sum)),
                is_refused(group.all_reduce(&mut vec![1f32; 5000], ReduceOp::Sum)),
                is_refused(group.send(&[1u8], sender)),
                is_refused(group.start(Operation::barrier()).map(drop).map_err(|error| error.error)),
                is_refused(group.buffer::<u8>(10).map(drop)),
                is_refused(pending.wait().map(drop).map_err(|error| error.error)),
            ];
            group.abort();
            let closed = is_refused(group.clone().close());
            drop((group, buffer));
            match refused.iter().position(|refused| !refused) {
                Some(index) => 1 + index as i32,
                None if !closed => 100,
                None => 0,
            }
        });
        let ended = status(child);
        let (group, buffer, pending) = parent.take().expect("the child took its own");
        drop(buffer);
        *self.current.lock().expect("is not poisoned") = Some(group.clone());
        self.group = Some(group);
        say(&format!("{ended:?}"));
        // The parent goes on where it was.
        let begun = now();
        let result = pending.wait().map_err(|error| error.error);
        tell(begun, result.map(|data| expect(&data, |index| u64::from(sender) + 1 + ripple(index))));
    }

    /// A receive that is under way while this rank is in no call, until it is told to go on; then a
    /// collective, and only then the receive's end.
    fn overlap(&mut self, line: &str) {
        let (asked, _, _) = self.asked(line);
        let (group, sender) = (asked.group, asked.root);
        let pending = group.start(Operation::recv(vec![0f32; asked.elements], sender)).expect("is accepted");
        say("started");
        assert_eq!(self.commands.recv().as_deref(), Ok("go on"));
        let begun = now();
        let result = group.barrier();
        let result = result.and_then(|()| pending.wait().map_err(|error| error.error));
        tell(begun, result.map(|data| expect(&data, |index| u64::from(sender) + 1 + ripple(index))));
    }

    /// Joins and closes groups in a row; returns how many descriptors and threads there are after
    /// the first few and at the end.
    fn rejoin(&mut self, times: u32) {
        let count = |folder: &str| std::fs::read_dir(folder).expect("is readable").count();
        let current = || [count("/proc/self/fd"), count("/proc/self/task"), mappings()];
        // The kernel lists a thread for a moment after it was joined, so the least of some counts.
        let mut early = [usize::MAX; 3];
        for time in 0..times {
            self.join(self.folder.clone());
            let group = self.group.take().expect("has joined");
            self.current.lock().expect("is not poisoned").take();
            let mut data = group.buffer::<f32>(1000).expect("there is memory");
            data.fill(1.0);
            group.all_reduce(&mut data, ReduceOp::Sum).expect("nothing fails");
            assert!(data.iter().all(|element| *element == self.count as f32));
            drop(data);
            if time % 2 == 0 {
                group.close().expect("nothing fails");
            } else {
                group.barrier().expect("nothing fails");
                drop(group);
            }
            if (4..=10).contains(&time) {
                early.iter_mut().zip(current()).for_each(|(least, now)| *least = now.min(*least));
            }
        }
        let deadline = now() + SETTLED_WITHIN;
        let mut late = current();
        while late != early && now() < deadline {
            std::thread::yield_now();
            late = current();
        }
        say(&format!("{early:?}; {late:?}"));
    }
}

/// How long the kernel may list what has ended.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// How many mappings this process has of memory that can be shared.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("is readable");
    maps.lines().filter(|line| line.contains("memfd:")).count()
}

/// All memory repeats itself after so many elements at most.
const PERIOD: usize = 7;

/// Differs between elements, so that a shifted result is a wrong one.
fn ripple(index: usize) -> u64 {
    (index % PERIOD) as u64
}

/// Fills `data` with `period`, again and again. Bytes are copied and compared, not elements: a loop
/// over gigabytes of elements takes minutes where it is not optimized.
fn fill<T: Element>(data: &mut [T], period: &[T]) {
    let mut filled = data.len().min(period.len());
    data[..filled].copy_from_slice(&period[..filled]);
    while filled < data.len() {
        let more = filled.min(data.len() - filled);
        data.copy_within(..more, filled);
        filled += more;
    }
}

/// The first element that is not that of `period`, again and again.
fn first_difference<T: Element>(data: &[T], period: &[T]) -> Option<usize> {
    let bytes: &[u8] = bytemuck::cast_slice(data);
    let head = data.len().min(period.len());
    let shift = size_of_val(&data[..head]);
    if data[..head] == period[..head] && bytes[shift..] == bytes[..bytes.len() - shift] {
        return None;
    }
    data.iter().zip(period.iter().cycle()).position(|(element, expected)| element != expected)
}

trait Value: Element {
    fn of(value: u64) -> Self;
}

impl Value for f32 {
    fn of(value: u64) -> Self {
        value as Self
    }
}

impl Value for i32 {
    fn of(value: u64) -> Self {
        value as Self
    }
}

/// What a rank begins with. The receiver of a message begins with nothing.
fn begin<T: Value>(data: &mut [T], rank: Rank, asked: &Asked) {
    let value = |index| if asked.operation == "recv" { 99 } else { u64::from(rank) + 1 + ripple(index) };
    fill(data, &period(value));
}

fn expect<T: Value>(data: &[T], value: impl Fn(usize) -> u64) {
    if let Some(index) = first_difference(data, &period::<T>(&value)) {
        panic!("a wrong number: element {index} is {:?}, not {}", data[index], value(index));
    }
}

fn period<T: Value>(value: impl Fn(usize) -> u64) -> [T; PERIOD] {
    std::array::from_fn(|index| T::of(value(index)))
}

/// Makes the call and, if it ends well, checks what it returned.
fn perform<T, D>(asked: &Asked, player: &Player, data: &mut D) -> Result<(), CollectiveError>
where
    T: Value,
    D: DataMut<Element = T> + std::ops::Deref<Target = [T]>,
{
    let Asked { operation, op, root, group, .. } = asked;
    let ranks = player.count as usize;
    let own = u64::from(player.rank) + 1;
    let all = |index: usize| match op {
        ReduceOp::Max => ranks as u64 + ripple(index),
        _ => (1..=ranks as u64).map(|value| value + ripple(index)).sum(),
    };
    match operation.as_str() {
        "barrier" => group.barrier()?,
        "all-reduce" => {
            group.all_reduce(data, *op)?;
            expect(data, all);
        }
        "reduce" => {
            group.reduce(data, *op, *root)?;
            if *root == player.rank {
                expect(data, all);
            } else {
                expect(data, |index| own + ripple(index));
            }
        }
        "broadcast" => {
            group.broadcast(data, *root)?;
            expect(data, |index| u64::from(*root) + 1 + ripple(index));
        }
        "all-gather" => {
            let len = data.len();
            let mut output = vec![T::of(0); len * ranks];
            group.all_gather(data, &mut output)?;
            for (rank, part) in (0u64..).zip(output.chunks(len.max(1))) {
                expect(part, |index| rank + 1 + ripple(index));
            }
        }
        "send" => group.send(data, *root)?,
        "recv" => {
            group.recv(data, *root)?;
            expect(data, |index| u64::from(*root) + 1 + ripple(index));
        }
        _ => panic!("unknown operation: {operation}"),
    }
    Ok(())
}

/// Says how a call ended.
fn tell(begun: pleach::transport::Nanos, result: Result<(), CollectiveError>) {
    let at = now();
    let took = at.since(begun).as_nanos();
    match result {
        Ok(()) => say(&format!("done {} {took}", at.0)),
        Err(CollectiveError::Failed(fault)) => {
            let texts = format!("{fault}{TOLD}{fault:#}");
            say(&format!("failed {} {took} {:?} {} {texts}", at.0, fault.kind, fault.subject));
        }
        Err(CollectiveError::Forked { owner }) => say(&format!("failed {} {took} Forked {owner} -", at.0)),
        Err(other) => say(&format!("failed {} {took} Other - {other}", at.0)),
    }
}
