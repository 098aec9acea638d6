//! Records that the kernel opens, so that data come into their places by one pass (Linux, `kTLS`).
//!
//! Data connections alone are taken over, and only where they receive. What this process seals,
//! the kernel takes as before: bytes that a socket has taken are in its queue, which holds for
//! records of the kernel's own only when it had room for them.
//!
//! The kernel replaces a key only since Linux 6.14, and a connection that it has taken over does
//! not come back. So [`support`] tries both once, where `PLEACH_TLS_KERNEL=on` asks for it; without
//! both each record is opened here.
//!
//! The kernel passes over records without data itself and says nothing of them. So the bound that
//! [`super::record`] has on them does not hold here: a peer that has proved the secret can have the
//! kernel open such records within a receive.
//!
//! **Invariant:** a connection is taken over between two records, with the number of the next one.
//! Until its record is verified, a byte may lie in its place already; nobody is told of it, and if
//! the record is wrong the connection ends.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};

use rustls::ConnectionTrafficSecrets;

use super::handshake::{KeySchedule, refusal};
use super::record::{ALERT, HANDSHAKE, KEY_UPDATE, TlsReader};
use super::{ReadFailure, TlsFault};
use crate::mutex::lock;

/// Of a socket whose records the kernel opens: no record is longer than its data. `libc` does not
/// have it.
const TLS_RX_EXPECT_NO_PAD: libc::c_int = 4;

/// Longest form of a key, in bytes.
const KEY_BYTES_MAX: usize = 56;

/// Bytes of a number of a record.
const NUMBER_BYTES: usize = 8;

/// A key as the kernel takes it (`struct tls12_crypto_info_*` of `linux/tls.h`): version and
/// cipher, then nonce, key, salt and the number of the next record.
#[derive(Clone, Copy)]
pub(crate) struct KernelKey {
    bytes: [u8; KEY_BYTES_MAX],
    len: usize,
}

impl KernelKey {
    /// `None`: a cipher that the kernel does not have.
    pub(crate) fn new((next, secrets): &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        let (cipher, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (libc::TLS_CIPHER_AES_GCM_128, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (libc::TLS_CIPHER_AES_GCM_256, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
                (libc::TLS_CIPHER_CHACHA20_POLY1305, key, iv)
            }
            _ => return None,
        };
        // The kernel splits the twelve bytes of AES-GCM: the first four are a salt.
        let salted = if cipher == libc::TLS_CIPHER_CHACHA20_POLY1305 { 0 } else { 4 };
        let (salt, nonce) = iv.as_ref().split_at_checked(salted)?;
        let (version, cipher) = (libc::TLS_1_3_VERSION.to_ne_bytes(), cipher.to_ne_bytes());
        let number = next.to_be_bytes();
        let mut all = Self { bytes: [0; KEY_BYTES_MAX], len: 0 };
        for part in [&version[..], &cipher, nonce, key.as_ref(), salt, &number] {
            all.bytes.get_mut(all.len..all.len + part.len())?.copy_from_slice(part);
            all.len += part.len();
        }
        Some(all)
    }

    /// With this number of the next record.
    pub(crate) fn numbered(mut self, next: u64) -> Self {
        self.bytes[self.len - NUMBER_BYTES..self.len].copy_from_slice(&next.to_be_bytes());
        self
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Opens what the other end sends, in the kernel.
pub(crate) struct KernelReader {
    schedule: Arc<Mutex<KeySchedule>>,
    /// The key has opened data, so another one may follow it.
    may_change_key: bool,
}

impl KernelReader {
    /// The kernel takes a connection over; gives the reader back where it does not.
    pub(crate) fn take_over(socket: BorrowedFd<'_>, reader: Box<TlsReader>) -> Result<Self, Box<TlsReader>> {
        if support().is_err() { Err(reader) } else { Self::hand_over(socket, reader) }
    }

    fn hand_over(socket: BorrowedFd<'_>, reader: Box<TlsReader>) -> Result<Self, Box<TlsReader>> {
        let Some((key, schedule)) = reader.to_kernel() else { return Err(reader) };
        if add_tls(socket).and_then(|()| set_key(socket, libc::TLS_RX, &key)).is_err() {
            return Err(reader);
        }
        // Where it is refused, the kernel copies each record once more.
        let _ = set(socket, libc::SOL_TLS, TLS_RX_EXPECT_NO_PAD, &1_i32.to_ne_bytes());
        Ok(Self { schedule, may_change_key: false })
    }

    /// Data were received.
    pub(crate) fn has_received(&mut self) {
        self.may_change_key = true;
    }

    /// A receive failed: goes on with another key where the next record says so.
    ///
    /// # Errors
    ///
    /// What the other end has done, or the error itself.
    pub(crate) fn failed(&mut self, socket: BorrowedFd<'_>, error: io::Error) -> Result<(), ReadFailure> {
        match error.raw_os_error() {
            // A record is next that holds no data.
            Some(libc::EIO) => {}
            Some(libc::EBADMSG | libc::EINVAL | libc::EMSGSIZE) => return Err(TlsFault::Tampered.into()),
            _ => return Err(ReadFailure::System(error)),
        }
        let mut room = [0; 64];
        let (kind, count) = receive_record(socket, &mut room).map_err(ReadFailure::System)?;
        match (kind, &room[..count]) {
            (HANDSHAKE, bytes) if *bytes == KEY_UPDATE => {
                if !std::mem::take(&mut self.may_change_key) {
                    return Err(TlsFault::NoData.into());
                }
                let next = lock(&self.schedule).next_to_receive();
                let key = next.as_ref().and_then(KernelKey::new).ok_or(TlsFault::Handshake)?;
                set_key(socket, libc::TLS_RX, &key).map_err(ReadFailure::System)
            }
            (ALERT, &[_, description]) => Err(refusal(description).into()),
            _ => Err(TlsFault::Handshake.into()),
        }
    }
}

/// Whether the kernel is to open records and replaces keys, or why not. Tried once, and said in the
/// log.
pub(crate) fn support() -> Result<(), &'static str> {
    static SUPPORT: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *SUPPORT.get_or_init(|| {
        let is_asked_for = std::env::var_os("PLEACH_TLS_KERNEL").is_some_and(|value| value == "on");
        let found = if is_asked_for { probe() } else { Err("PLEACH_TLS_KERNEL is not set to on") };
        match found {
            Ok(()) => tracing::info!("TLS: the kernel opens records of data"),
            Err(reason) => tracing::info!("TLS: records of data are opened in user space: {reason}"),
        }
        found
    })
}

fn probe() -> Result<(), &'static str> {
    let pair = TcpListener::bind("127.0.0.1:0").and_then(|listener| {
        let dialed = TcpStream::connect(listener.local_addr()?)?;
        Ok((dialed, listener.accept()?))
    });
    let (socket, _other) = pair.map_err(|_| "no connection over loopback")?;
    add_tls(socket.as_fd()).map_err(|_| "this kernel has no TLS (module tls)")?;
    let mut key = KernelKey { bytes: [7; KEY_BYTES_MAX], len: 40 };
    key.bytes[..2].copy_from_slice(&libc::TLS_1_3_VERSION.to_ne_bytes());
    key.bytes[2..4].copy_from_slice(&libc::TLS_CIPHER_AES_GCM_128.to_ne_bytes());
    let set = || set_key(socket.as_fd(), libc::TLS_RX, &key.numbered(0));
    set().map_err(|_| "this kernel's TLS has no AES-128-GCM of TLS 1.3")?;
    set().map_err(|_| "this kernel's TLS replaces no key (Linux before 6.14)")
}

/// Adds TLS to a connection, without keys.
fn add_tls(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_TCP, libc::TCP_ULP, b"tls")
}

fn set_key(socket: BorrowedFd<'_>, direction: libc::c_int, key: &KernelKey) -> io::Result<()> {
    set(socket, libc::SOL_TLS, direction, key.as_bytes())
}

fn set(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `value`, which is borrowed for the call, in its length.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), value.len() as _)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives the next record with its type, if it is there.
fn receive_record(socket: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<(u8, usize)> {
    /// Room for one control message of one byte, aligned as its header.
    #[repr(C)]
    union Control {
        _header: libc::cmsghdr,
        bytes: [u8; 64],
    }
    let mut control = Control { bytes: [0; 64] };
    let mut vector = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: all-zero is the documented empty value of this plain C structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut vector, 1);
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<Control>() as _);
    // SAFETY: the vector names `room`, which is borrowed mutably for this call, and the control
    // room is a local. The kernel writes at most their lengths and keeps no address.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has set length and content of the control room, where the macros look.
    let kind = unsafe {
        let first = libc::CMSG_FIRSTHDR(&message);
        let is_type = !first.is_null()
            && (*first).cmsg_level == libc::SOL_TLS
            && (*first).cmsg_type == libc::TLS_GET_RECORD_TYPE;
        is_type.then(|| *libc::CMSG_DATA(first))
    };
    kind.map(|kind| (kind, count)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::super::tests::sessions;
    use super::*;
    use crate::skipped::skip;

    /// A connection whose dialer's records the kernel opens at the listener, and what seals them.
    fn taken_over() -> Option<(TcpStream, super::super::TlsWriter, TcpStream, KernelReader)> {
        if let Err(reason) = probe() {
            skip(reason);
            return None;
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let dialed = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (accepted, _) = listener.accept().expect("dialed");
        let [low, high] = sessions();
        let (writer, _) = low.split();
        let (_, reader) = high.split();
        let reader = KernelReader::hand_over(accepted.as_fd(), Box::new(reader)).map_err(drop);
        Some((dialed, writer, accepted, reader.expect("it is supported")))
    }

    /// Receives so many bytes, and goes on with other keys.
    fn receive(
        socket: &mut TcpStream,
        reader: &mut KernelReader,
        bytes: &mut [u8],
    ) -> Result<(), ReadFailure> {
        let mut filled = 0;
        while filled < bytes.len() {
            match socket.read(&mut bytes[filled..]) {
                Ok(0) => return Err(ReadFailure::System(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    reader.has_received();
                    filled += count;
                }
                Err(error) => reader.failed(socket.as_fd(), error)?,
            }
        }
        Ok(())
    }

    #[test]
    fn the_kernel_opens_what_was_sealed_here_under_one_key_after_the_other() {
        let Some((mut dialed, mut writer, mut accepted, mut reader)) = taken_over() else { return };
        writer.set_records_a_key(3);
        let sent: Vec<u8> = (0..1_000_000_u32).map(|at| (at * 7 + at / 256) as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for piece in sent.chunks(100_000) {
                    writer.seal(piece);
                    dialed.write_all(&writer.take_waiting()).expect("it is read");
                }
            });
            let mut received = vec![0; sent.len()];
            receive(&mut accepted, &mut reader, &mut received).expect("nothing was changed");
            assert!(received == sent);
        });
    }

    #[test]
    fn the_kernel_finds_out_what_was_changed_and_gives_nothing_of_it() {
        let Some((mut dialed, mut writer, mut accepted, mut reader)) = taken_over() else { return };
        writer.seal(b"first");
        let first = writer.take_waiting();
        writer.seal(b"second");
        let mut second = writer.take_waiting();
        second[7] ^= 1;
        dialed.write_all(&[first, second].concat()).expect("room");
        let mut received = [0; 5];
        receive(&mut accepted, &mut reader, &mut received).expect("the first is whole");
        assert_eq!(&received, b"first");
        let failure = receive(&mut accepted, &mut reader, &mut received);
        assert!(matches!(failure, Err(ReadFailure::Fault(TlsFault::Tampered))), "{failure:?}");
    }

    #[test]
    fn the_kernel_takes_no_key_that_follows_one_without_data() {
        let Some((mut dialed, mut writer, mut accepted, mut reader)) = taken_over() else { return };
        writer.set_records_a_key(0);
        writer.seal(b"first");
        dialed.write_all(&writer.take_waiting()).expect("room");
        let failure = receive(&mut accepted, &mut reader, &mut [0; 5]);
        assert!(matches!(failure, Err(ReadFailure::Fault(TlsFault::NoData))), "{failure:?}");
    }
}
