//! Records of TLS 1.3 under the keys of one direction (RFC 8446, sections 5.2, 5.3 and 7.2).
//!
//! rustls makes the keys and their successors; `ring` seals and opens. Both ends keep one buffer,
//! so a message costs no allocation: plain bytes are written to the place where they are sealed,
//! and sealed bytes are opened where they were received.
//!
//! **Invariants:** a nonce is used once: [`RecordKey::nonce`] is the one place that makes nonces,
//! and no number of a key comes twice. Bytes are given out only after their record was verified,
//! in the order in which they were sealed, none left out. Each record that is taken gives bytes,
//! but for one that changes the key behind a record that gave some. So whoever reads as long as
//! bytes come cannot be held by records without data.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use ring::aead::{self, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets;

use super::TlsFault;
use super::handshake::KeySchedule;
use super::kernel::KernelKey;
use crate::mutex::lock;

/// Longest plain text of a record, in bytes.
pub const PLAIN_BYTES_MAX: usize = 16 << 10;

/// What a record adds to its plain text, in bytes: header, type and tag.
pub(crate) const RECORD_OVERHEAD_BYTES: usize = HEADER_BYTES + 1 + TAG_BYTES;

/// Length of a record's header, in bytes: type (1), version (2), length of the rest (2).
pub(crate) const HEADER_BYTES: usize = 5;

/// Longest record without its header, in bytes.
pub(crate) const SEALED_BYTES_MAX: usize = PLAIN_BYTES_MAX + 256;

const TAG_BYTES: usize = 16;

/// The version that records name, which TLS 1.3 takes over from TLS 1.2.
const VERSION: [u8; 2] = [3, 3];

pub(crate) const ALERT: u8 = 21;
pub(crate) const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// The message that ends the use of a key, and asks for none in return.
pub(crate) const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// Records under one key; AES-GCM allows about 2²⁴ of them (RFC 8446, section 5.5).
const RECORDS_A_KEY: u64 = 1 << 23;

/// Records that a connection for data seals or receives at once.
pub const RECORDS_AT_ONCE: usize = 4;

/// The key of one direction, and the number of its next record.
struct RecordKey {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    next: u64,
    /// The same for the kernel, if it has the cipher.
    kernel: Option<KernelKey>,
}

impl RecordKey {
    fn new(secrets: &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        let kernel = KernelKey::new(secrets);
        let (next, secrets) = secrets;
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&aead::AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&aead::AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&aead::CHACHA20_POLY1305, key, iv),
            _ => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).ok()?);
        Some(Self { key, iv: iv.as_ref().try_into().ok()?, next: *next, kernel })
    }

    fn nonce(&mut self) -> Nonce {
        let mut bytes = self.iv;
        for (byte, number) in bytes[NONCE_LEN - 8..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        self.next += 1;
        Nonce::assume_unique_for_key(bytes)
    }
}

/// Seals what one end sends.
pub struct TlsWriter {
    key: RecordKey,
    schedule: Arc<Mutex<KeySchedule>>,
    records_a_key: u64,
    buffer: Vec<u8>,
    /// The sealed bytes that were not sent.
    waiting: Range<usize>,
}

impl TlsWriter {
    pub(crate) fn new(
        secrets: &(u64, ConnectionTrafficSecrets),
        schedule: Arc<Mutex<KeySchedule>>,
    ) -> Option<Self> {
        let key = RecordKey::new(secrets)?;
        Some(Self { key, schedule, records_a_key: RECORDS_A_KEY, buffer: Vec::new(), waiting: 0..0 })
    }

    /// Seals bytes behind those that wait.
    pub fn seal(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(PLAIN_BYTES_MAX) {
            self.seal_record(piece.len(), |room| room.copy_from_slice(piece));
        }
    }

    /// Seals one record of `len` bytes, which `write` fills in, behind those that wait.
    ///
    /// # Panics
    ///
    /// When `len` is above [`PLAIN_BYTES_MAX`].
    pub fn seal_record(&mut self, len: usize, write: impl FnOnce(&mut [u8])) {
        assert!(len <= PLAIN_BYTES_MAX, "{len} bytes in a record");
        if self.key.next >= self.records_a_key {
            self.record(HANDSHAKE, KEY_UPDATE.len(), |room| room.copy_from_slice(&KEY_UPDATE));
            let secrets = lock(&self.schedule).next_to_send();
            self.key = secrets.as_ref().and_then(RecordKey::new).expect("TLS 1.3 keys have successors");
        }
        self.record(APPLICATION_DATA, len, write);
    }

    fn record(&mut self, kind: u8, len: usize, write: impl FnOnce(&mut [u8])) {
        let start = self.waiting.end;
        let end = start + len + RECORD_OVERHEAD_BYTES;
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        let [high, low] = ((len + 1 + TAG_BYTES) as u16).to_be_bytes();
        let header = [APPLICATION_DATA, VERSION[0], VERSION[1], high, low];
        let (head, rest) = self.buffer[start..end].split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&header);
        let (inner, tag) = rest.split_at_mut(len + 1);
        write(&mut inner[..len]);
        inner[len] = kind;
        let nonce = self.key.nonce();
        let sealed = self.key.key.seal_in_place_separate_tag(nonce, Aad::from(header), inner);
        tag.copy_from_slice(sealed.expect("a record is shorter than a cipher's limit").as_ref());
        self.waiting.end = end;
    }

    /// The sealed bytes that were not sent.
    #[must_use]
    pub fn waiting(&self) -> &[u8] {
        &self.buffer[self.waiting.clone()]
    }

    /// `count` bytes of those that waited were sent.
    pub fn sent(&mut self, count: usize) {
        self.waiting.start += count;
        if self.waiting.is_empty() {
            self.waiting = 0..0;
        }
    }

    /// All sealed bytes that wait, which the caller sends.
    #[must_use]
    pub fn take_waiting(&mut self) -> Vec<u8> {
        let bytes = self.waiting().to_vec();
        self.sent(bytes.len());
        bytes
    }

    /// For tests: a key is followed by its successor after this number of records.
    #[cfg(test)]
    pub(crate) fn set_records_a_key(&mut self, records: u64) {
        self.records_a_key = records;
    }
}

/// Opens what the other end sends.
pub struct TlsReader {
    key: RecordKey,
    schedule: Arc<Mutex<KeySchedule>>,
    buffer: Vec<u8>,
    /// The bytes that were received and not opened.
    sealed: Range<usize>,
    /// The opened bytes that were not taken; before the sealed ones.
    plain: Range<usize>,
    /// The key has opened data, so another one may follow it.
    may_change_key: bool,
}

impl TlsReader {
    pub(crate) fn new(
        secrets: &(u64, ConnectionTrafficSecrets),
        schedule: Arc<Mutex<KeySchedule>>,
    ) -> Option<Self> {
        let (key, buffer) = (RecordKey::new(secrets)?, Vec::new());
        Some(Self { key, schedule, buffer, sealed: 0..0, plain: 0..0, may_change_key: false })
    }

    /// The key with the number of the next record, and its successors, where all that was received
    /// was taken.
    pub(crate) fn to_kernel(&self) -> Option<(KernelKey, Arc<Mutex<KeySchedule>>)> {
        let key = self.key.kernel?.numbered(self.key.next);
        let is_between_records = self.sealed.is_empty() && self.plain.is_empty();
        is_between_records.then(|| (key, Arc::clone(&self.schedule)))
    }

    /// Room for received bytes, at least for the rest of a record. Called when all opened bytes
    /// were taken and no whole record is left.
    pub fn room(&mut self, records: usize) -> &mut [u8] {
        let bytes = records * (HEADER_BYTES + SEALED_BYTES_MAX);
        if self.buffer.len() < bytes {
            self.buffer.resize(bytes, 0);
        }
        if self.plain.is_empty() && self.sealed.start > 0 {
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
        }
        &mut self.buffer[self.sealed.end..]
    }

    /// As [`TlsReader::room`], but no longer than the record that is coming: what follows stays
    /// in the socket.
    pub fn room_of_record(&mut self) -> &mut [u8] {
        let _ = self.room(1);
        let have = self.sealed.len();
        let wanted = match self.buffer[self.sealed.clone()].first_chunk() {
            Some(header) => HEADER_BYTES + length(header).min(SEALED_BYTES_MAX),
            None => HEADER_BYTES,
        };
        let end = self.sealed.end;
        &mut self.buffer[end..end + wanted.saturating_sub(have)]
    }

    /// `count` bytes were received into the room.
    pub fn received(&mut self, count: usize) {
        self.sealed.end += count;
    }

    /// The opened bytes; empty when no whole record is there.
    ///
    /// # Errors
    ///
    /// When a record is not what the other end has sealed.
    pub fn plain(&mut self) -> Result<&[u8], TlsFault> {
        while self.plain.is_empty() && self.open_next()? {}
        Ok(&self.buffer[self.plain.clone()])
    }

    /// `count` of the opened bytes were taken.
    pub fn take(&mut self, count: usize) {
        self.plain.start += count;
    }

    /// Whether opened bytes or a whole record wait here.
    #[must_use]
    pub fn has_whole(&self) -> bool {
        let sealed = &self.buffer[self.sealed.clone()];
        let is_whole = |header| sealed.len() >= HEADER_BYTES + length(header).min(SEALED_BYTES_MAX);
        !self.plain.is_empty() || sealed.first_chunk().is_some_and(is_whole)
    }

    /// Opens the next record, if it is whole.
    fn open_next(&mut self) -> Result<bool, TlsFault> {
        let tampered = TlsFault::Tampered;
        let start = self.sealed.start;
        let sealed = &mut self.buffer[self.sealed.clone()];
        let Some(header) = sealed.first_chunk::<HEADER_BYTES>().copied() else { return Ok(false) };
        let len = length(&header);
        if header[0] != APPLICATION_DATA || header[1..3] != VERSION || len > SEALED_BYTES_MAX {
            return Err(tampered);
        }
        let Some(record) = sealed.get_mut(HEADER_BYTES..HEADER_BYTES + len) else { return Ok(false) };
        let nonce = self.key.nonce();
        let opened = self.key.key.open_in_place(nonce, Aad::from(header), record).map_err(|_| tampered)?;
        // Behind the type there may be zeros, which hide the length; no end here sends any.
        let len_plain = opened.iter().rposition(|&byte| byte != 0).ok_or(tampered)?;
        let (plain, kind) = (&opened[..len_plain], opened[len_plain]);
        if len_plain > PLAIN_BYTES_MAX {
            return Err(tampered);
        }
        match kind {
            // No end here seals such a record.
            APPLICATION_DATA if plain.is_empty() => return Err(TlsFault::NoData),
            APPLICATION_DATA => {
                let from = start + HEADER_BYTES;
                self.plain = from..from + len_plain;
                self.may_change_key = true;
            }
            HANDSHAKE if plain == KEY_UPDATE => {
                if !std::mem::take(&mut self.may_change_key) {
                    return Err(TlsFault::NoData);
                }
                let secrets = lock(&self.schedule).next_to_receive();
                self.key = secrets.as_ref().and_then(RecordKey::new).ok_or(tampered)?;
            }
            ALERT if plain.len() == 2 => return Err(super::handshake::refusal(plain[1])),
            _ => return Err(TlsFault::Handshake),
        }
        self.sealed.start = start + HEADER_BYTES + len;
        Ok(true)
    }
}

fn length(header: &[u8; HEADER_BYTES]) -> usize {
    usize::from(u16::from_be_bytes([header[3], header[4]]))
}
