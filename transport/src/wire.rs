//! Numbers and bytes of messages, little endian. The bytes are unchecked. A [`Reader`] never reads
//! beyond their end and takes no length without a limit, so limits come before allocations.

use crate::device::ProtocolViolation;

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl From<Malformed> for ProtocolViolation {
    fn from(Malformed: Malformed) -> Self {
        Self::MalformedFrame
    }
}

/// Takes fields from the beginning of bytes.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*field)
    }

    pub fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    pub fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of things that follow, at most `max`.
    pub fn count(&mut self, max: usize) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        if count <= max { Ok(count) } else { Err(Malformed) }
    }

    /// Bytes after their length, which is at most `max`.
    pub fn bytes(&mut self, max: usize) -> Result<&'a [u8], Malformed> {
        let length = self.count(max)?;
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    /// As [`Reader::bytes`], of UTF-8.
    pub fn text(&mut self, max: usize) -> Result<String, Malformed> {
        let text = std::str::from_utf8(self.bytes(max)?).map_err(|_| Malformed)?;
        Ok(text.to_owned())
    }

    /// All bytes that are left, at most `max`.
    pub fn rest(&mut self, max: usize) -> Result<&'a [u8], Malformed> {
        let rest = std::mem::take(&mut self.0);
        if rest.len() <= max { Ok(rest) } else { Err(Malformed) }
    }

    /// As [`Reader::rest`], of UTF-8.
    pub fn text_to_end(&mut self, max: usize) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.rest(max)?).map_err(|_| Malformed)
    }

    /// Whether nothing follows.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Refuses bytes that follow.
    pub fn end(&self) -> Result<(), Malformed> {
        if self.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

/// Appends fields.
#[derive(Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    pub fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn u8(self, value: u8) -> Self {
        self.raw(&[value])
    }

    pub fn u16(self, value: u16) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub fn u32(self, value: u32) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }

    /// A number of things that follow. Limits keep it far below 2³².
    pub fn count(self, count: usize) -> Self {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Bytes after their length.
    pub fn bytes(self, bytes: &[u8]) -> Self {
        self.count(bytes.len()).raw(bytes)
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    /// # Panics
    ///
    /// When the fields are not `N` bytes long.
    pub fn to_array<const N: usize>(&self) -> [u8; N] {
        self.0[..].try_into().expect("fields of a fixed length")
    }
}
