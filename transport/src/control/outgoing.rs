//! The queue of frames to one peer whose stream takes no more now: whole frames in order, of each
//! kind up to a number of bytes.

use std::collections::VecDeque;

use rustix::io::Errno;

/// Bytes of posted messages that wait at most.
const POSTED_BYTES_MAX: usize = 256 << 10;

/// Bytes of replies and of the fabric's own messages that wait at most. A full stream holds fewer
/// requests, so only a peer that never reads reaches the limit.
const REPLIED_BYTES_MAX: usize = 4 << 20;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// A message of a user.
    Post,
    /// A message of a user that always has room: it replaces one that still waits.
    Urgent,
    /// An answer to a message, or a message of the fabric.
    Reply,
    /// A frame that is sent once, as a bye.
    Single,
}

/// Too many bytes of this kind wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutgoingFull;

/// See the module.
#[derive(Default)]
pub(crate) struct Outgoing {
    frames: VecDeque<(FrameKind, Vec<u8>)>,
    /// Bytes of the first frame that have been sent.
    sent: usize,
    posted_bytes: usize,
    replied_bytes: usize,
}

impl Outgoing {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Appends a frame.
    pub(crate) fn push(&mut self, kind: FrameKind, frame: Vec<u8>) -> Result<(), OutgoingFull> {
        match kind {
            FrameKind::Post if self.posted_bytes > POSTED_BYTES_MAX => return Err(OutgoingFull),
            FrameKind::Reply if self.replied_bytes > REPLIED_BYTES_MAX => return Err(OutgoingFull),
            FrameKind::Post => self.posted_bytes += frame.len(),
            FrameKind::Reply => self.replied_bytes += frame.len(),
            FrameKind::Urgent => {
                // A frame that is partly sent must be completed.
                let begun = usize::from(self.sent > 0);
                let mut waiting = self.frames.iter_mut().skip(begun);
                if let Some((_, waiting)) = waiting.find(|(kind, _)| *kind == FrameKind::Urgent) {
                    *waiting = frame;
                    return Ok(());
                }
            }
            FrameKind::Single => {}
        }
        self.frames.push_back((kind, frame));
        Ok(())
    }

    /// Calls `send` with the remaining bytes until all are sent or `send` fails. `send` returns how
    /// many bytes it sent.
    pub(crate) fn flush(&mut self, mut send: impl FnMut(&[u8]) -> Result<usize, Errno>) -> Result<(), Errno> {
        while let Some((kind, frame)) = self.frames.front() {
            match send(&frame[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            }
            if self.sent < frame.len() {
                continue;
            }
            match kind {
                FrameKind::Post => self.posted_bytes -= frame.len(),
                FrameKind::Reply => self.replied_bytes -= frame.len(),
                FrameKind::Urgent | FrameKind::Single => {}
            }
            self.sent = 0;
            self.frames.pop_front();
        }
        Ok(())
    }

    /// Drops all frames.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that takes `room` bytes.
    fn stream(mut room: usize, sent: &mut Vec<u8>) -> impl FnMut(&[u8]) -> Result<usize, Errno> {
        move |bytes| {
            let count = bytes.len().min(room);
            room -= count;
            sent.extend_from_slice(&bytes[..count]);
            if count == 0 { Err(Errno::AGAIN) } else { Ok(count) }
        }
    }

    #[test]
    fn frames_go_out_whole_and_in_order_however_little_the_stream_takes() {
        let mut outgoing = Outgoing::default();
        for (kind, frame) in
            [(FrameKind::Post, &b"one"[..]), (FrameKind::Reply, b"two"), (FrameKind::Single, b"bye")]
        {
            outgoing.push(kind, frame.to_vec()).expect("there is room");
        }
        let mut sent = Vec::new();
        for _ in 0..9 {
            assert!(!outgoing.is_empty());
            let _ = outgoing.flush(stream(1, &mut sent));
        }
        assert_eq!(sent, b"onetwobye");
        assert!(outgoing.is_empty());
        assert_eq!((outgoing.posted_bytes, outgoing.replied_bytes), (0, 0));
    }

    #[test]
    fn an_urgent_frame_takes_the_place_of_one_that_waits_and_not_of_one_that_has_begun() {
        let mut outgoing = Outgoing::default();
        for frame in [&b"1st"[..], b"2nd"] {
            outgoing.push(FrameKind::Urgent, frame.to_vec()).expect("there is room");
        }
        outgoing.push(FrameKind::Post, b"post".to_vec()).expect("there is room");
        let mut sent = Vec::new();
        assert_eq!(outgoing.flush(stream(1, &mut sent)), Err(Errno::AGAIN));
        for frame in [&b"3rd"[..], b"4th"] {
            outgoing.push(FrameKind::Urgent, frame.to_vec()).expect("there is room");
        }
        assert_eq!(outgoing.flush(stream(100, &mut sent)), Ok(()));
        assert_eq!(sent, b"2ndpost4th");
    }

    #[test]
    fn of_each_kind_so_many_bytes_wait_and_an_urgent_one_has_room() {
        let mut outgoing = Outgoing::default();
        for (kind, most) in [(FrameKind::Post, POSTED_BYTES_MAX), (FrameKind::Reply, REPLIED_BYTES_MAX)] {
            let taken = (0..).take_while(|_| outgoing.push(kind, vec![0; 4096]).is_ok()).count();
            assert_eq!(taken, most / 4096 + 1);
            assert_eq!(outgoing.push(kind, vec![0]), Err(OutgoingFull));
        }
        assert_eq!(outgoing.push(FrameKind::Urgent, vec![1]), Ok(()));
        assert_eq!(outgoing.push(FrameKind::Single, vec![2]), Ok(()));
        assert_eq!(outgoing.flush(|bytes| Ok(bytes.len())), Ok(()));
        assert_eq!(outgoing.push(FrameKind::Post, vec![0]), Ok(()));
    }
}
