//! The control connections of simulated programs: pairs of sockets, with a network between them
//! whose delays and cuts a seed decides.
//!
//! **Invariant:** bytes of one direction come once, in their order, in pieces of any length, until
//! the connection ends. Its end comes after all bytes that were sent before it, unless it was cut.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_transport::sim::Random;

use crate::Message;
use crate::endpoint::connection::Connection;
use crate::endpoint::frame::{self, FrameKind};

/// The longest delay of a piece, mostly.
const DELAY: Duration = Duration::from_micros(50);

/// The longest delay of some.
const LATE: Duration = Duration::from_millis(8);

/// The longest time until an end learns of a cut.
const DETECTION: Duration = Duration::from_millis(100);

/// A program's end of a connection: the number of the socket there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WireEnd {
    pub(crate) program: usize,
    pub(crate) number: u64,
}

enum Piece {
    Bytes(Vec<u8>),
    End,
}

struct Wire {
    /// The network's end of each socket; `None`: the end has been told.
    sockets: [Option<UnixStream>; 2],
    ends: [WireEnd; 2],
    /// What goes to each end.
    queues: [VecDeque<(Nanos, Piece)>; 2],
    is_cut: bool,
    /// A fault or a program has ended it before the end of the run.
    ended_early: bool,
}

/// See the module.
pub(crate) struct Wires {
    wires: Vec<Wire>,
    random: Random,
    /// The run ends: programs close what they have.
    finishes: bool,
    /// A program has closed a connection, and nothing had happened for which it might.
    has_unexplained: bool,
}

impl Wires {
    pub(crate) fn new(random: Random) -> Self {
        Self { wires: Vec::new(), random, finishes: false, has_unexplained: false }
    }

    /// A new connection, whose ends are told next.
    pub(crate) fn open(&mut self) -> (usize, [Connection; 2]) {
        let pairs = [(); 2].map(|()| {
            let (own, network) = UnixStream::pair().expect("a socket");
            own.set_nonblocking(true).expect("a socket");
            network.set_nonblocking(true).expect("a socket");
            (Connection::new(own.into()), network)
        });
        let [(first, one), (second, other)] = pairs;
        let (ends, queues) = ([WireEnd::default(); 2], [const { VecDeque::new() }; 2]);
        self.wires.push(Wire {
            sockets: [Some(one), Some(other)],
            ends,
            queues,
            is_cut: false,
            ended_early: false,
        });
        (self.wires.len() - 1, [first, second])
    }

    pub(crate) fn set_ends(&mut self, wire: usize, ends: [WireEnd; 2]) {
        self.wires[wire].ends = ends;
    }

    fn delay(random: &mut Random) -> Duration {
        let longest = if random.below(20) == 0 { LATE } else { DELAY };
        Duration::from_nanos(random.below(longest.as_nanos() as u64))
    }

    /// A time for the next piece of a queue: not before those in it.
    fn due(queue: &VecDeque<(Nanos, Piece)>, at: Nanos) -> Nanos {
        queue.back().map_or(at, |(last, _)| at.max(*last))
    }

    /// Takes what a program has sent.
    pub(crate) fn collect(&mut self, program: usize, now: Nanos) {
        for wire in &mut self.wires {
            for side in 0..2 {
                if wire.ends[side].program != program {
                    continue;
                }
                let Some(mut socket) = wire.sockets[side].as_ref() else { continue };
                let mut bytes = vec![0; 1 << 16];
                loop {
                    let to = &mut wire.queues[1 - side];
                    match socket.read(&mut bytes) {
                        Ok(0) => {
                            to.push_back((Self::due(to, now + Self::delay(&mut self.random)), Piece::End));
                            wire.sockets[side] = None;
                            self.has_unexplained |= !(wire.ended_early || self.finishes);
                            break;
                        }
                        // What is sent after a cut goes nowhere.
                        Ok(_) if wire.is_cut => {}
                        Ok(count) => {
                            let mut rest = &bytes[..count];
                            while !rest.is_empty() {
                                let length = match self.random.below(4) {
                                    0 => 1 + self.random.index(rest.len()),
                                    _ => rest.len(),
                                };
                                let (piece, later) = rest.split_at(length);
                                let due = Self::due(to, now + Self::delay(&mut self.random));
                                to.push_back((due, Piece::Bytes(piece.to_vec())));
                                rest = later;
                            }
                        }
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        // The program has closed its end with bytes unread.
                        Err(_) => {
                            to.push_back((Self::due(to, now), Piece::End));
                            wire.sockets[side] = None;
                            self.has_unexplained |= !(wire.ended_early || self.finishes);
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Brings what is due. Returns the ends whose sockets are ready.
    pub(crate) fn deliver(&mut self, now: Nanos) -> Vec<WireEnd> {
        let mut ready = Vec::new();
        for wire in &mut self.wires {
            for side in 0..2 {
                while let Some((due, piece)) = wire.queues[side].front_mut()
                    && *due <= now
                {
                    match (piece, wire.sockets[side].as_ref()) {
                        (Piece::Bytes(bytes), Some(mut socket)) => match socket.write(bytes) {
                            Ok(count) if count < bytes.len() => {
                                bytes.drain(..count);
                                // The program has yet to read.
                                *due = now + DELAY;
                                ready.push(wire.ends[side]);
                                break;
                            }
                            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                                *due = now + DELAY;
                                break;
                            }
                            _ => {}
                        },
                        (Piece::End, Some(_)) => wire.sockets[side] = None,
                        (_, None) => {}
                    }
                    wire.queues[side].pop_front();
                    ready.push(wire.ends[side]);
                }
            }
        }
        ready
    }

    /// When [`Wires::deliver`] has something to do.
    pub(crate) fn next(&self) -> Option<Nanos> {
        let queues = self.wires.iter().flat_map(|wire| &wire.queues);
        queues.filter_map(|queue| queue.front().map(|(due, _)| *due)).min()
    }

    /// Something that the sender at the second end has not sent comes to the first end.
    pub(crate) fn forge(&mut self, wire: usize, now: Nanos, message: &Message) {
        let Wire { queues: [queue, _], sockets: [Some(_), _], ended_early, .. } = &mut self.wires[wire]
        else {
            return;
        };
        *ended_early = true;
        let bytes = frame::encode(FrameKind::Message, &message.encode());
        queue.push_back((Self::due(queue, now), Piece::Bytes(bytes)));
    }

    /// The connection breaks: what is on its way may be lost, and each end learns of it by itself.
    pub(crate) fn cut(&mut self, wire: usize, now: Nanos) {
        let wire = &mut self.wires[wire];
        if std::mem::replace(&mut wire.is_cut, true) {
            return;
        }
        wire.ended_early = true;
        for queue in &mut wire.queues {
            queue.truncate(self.random.index(queue.len() + 1));
            let after = Duration::from_nanos(self.random.below(DETECTION.as_nanos() as u64));
            queue.push_back((Self::due(queue, now + after), Piece::End));
        }
    }

    /// A program is about to close a connection.
    pub(crate) fn will_close(&mut self, wire: usize) {
        self.wires[wire].ended_early = true;
    }

    /// The process of a program has ended: what it has sent still comes.
    pub(crate) fn kill(&mut self, program: usize, now: Nanos) {
        self.collect(program, now);
        for wire in &mut self.wires {
            for side in 0..2 {
                if wire.ends[side].program == program && wire.sockets[side].take().is_some() {
                    wire.ended_early = true;
                    wire.queues[side].clear();
                    let to = &mut wire.queues[1 - side];
                    to.push_back((Self::due(to, now + Self::delay(&mut self.random)), Piece::End));
                }
            }
        }
    }

    /// From now on programs close what they have.
    pub(crate) fn finish(&mut self) {
        self.finishes = true;
    }

    /// Whether a program has closed a connection without a reason.
    pub(crate) fn has_unexplained(&self) -> bool {
        self.has_unexplained
    }

    /// Whether the connection may have ended for one of its ends.
    pub(crate) fn has_ended(&self, wire: usize) -> bool {
        self.ended_early(wire) || self.finishes
    }

    /// Whether a fault or a program has ended it before the end of the run.
    pub(crate) fn ended_early(&self, wire: usize) -> bool {
        self.wires[wire].ended_early
    }
}
