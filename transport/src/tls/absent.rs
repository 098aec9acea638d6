//! A build without the feature `tls`: no end ever has keys, so no value of these types exists. They
//! are documented where they are.
#![allow(missing_docs)]

use std::io;
use std::os::fd::BorrowedFd;

use super::{CertificateFiles, ReadFailure, Session, TlsError, TlsFault};

pub const PLAIN_BYTES_MAX: usize = 16 << 10;
pub const RECORDS_AT_ONCE: usize = 1;

enum Never {}

pub(crate) struct Ends(Never);

impl Ends {
    pub(crate) fn new(_certificates: Option<&CertificateFiles>) -> Result<Self, TlsError> {
        Err(TlsError::NotBuilt)
    }
}

pub struct TlsHandshake(Never);

impl TlsHandshake {
    pub(crate) fn dial(ends: &Ends) -> Result<Self, TlsFault> {
        match ends.0 {}
    }

    pub(crate) fn listen(ends: &Ends) -> Result<Self, TlsFault> {
        match ends.0 {}
    }

    pub fn take_outgoing(&mut self) -> Vec<u8> {
        match self.0 {}
    }

    pub fn room(&mut self) -> &mut [u8] {
        match self.0 {}
    }

    pub fn received(&mut self, _count: usize) -> Result<bool, TlsFault> {
        match self.0 {}
    }

    pub fn finish(self) -> Result<Session, TlsFault> {
        match self.0 {}
    }
}

pub struct TlsWriter(Never);

impl TlsWriter {
    pub fn seal(&mut self, _bytes: &[u8]) {
        match self.0 {}
    }

    pub fn seal_record(&mut self, _len: usize, _write: impl FnOnce(&mut [u8])) {
        match self.0 {}
    }

    pub fn waiting(&self) -> &[u8] {
        match self.0 {}
    }

    pub fn sent(&mut self, _count: usize) {
        match self.0 {}
    }

    pub fn take_waiting(&mut self) -> Vec<u8> {
        match self.0 {}
    }
}

pub struct TlsReader(Never);

impl TlsReader {
    pub fn room(&mut self, _records: usize) -> &mut [u8] {
        match self.0 {}
    }

    pub fn room_of_record(&mut self) -> &mut [u8] {
        match self.0 {}
    }

    pub fn received(&mut self, _count: usize) {
        match self.0 {}
    }

    pub fn plain(&mut self) -> Result<&[u8], TlsFault> {
        match self.0 {}
    }

    pub fn has_whole(&self) -> bool {
        match self.0 {}
    }

    pub fn take(&mut self, _count: usize) {
        match self.0 {}
    }
}

pub(crate) struct KernelReader(Never);

impl KernelReader {
    #[expect(clippy::boxed_local, reason = "as in a build with the feature, where a box is given back")]
    pub(crate) fn take_over(_socket: BorrowedFd<'_>, reader: Box<TlsReader>) -> Result<Self, Box<TlsReader>> {
        match reader.0 {}
    }

    pub(crate) fn has_received(&mut self) {
        match self.0 {}
    }

    pub(crate) fn failed(&mut self, _socket: BorrowedFd<'_>, _error: io::Error) -> Result<(), ReadFailure> {
        match self.0 {}
    }
}
