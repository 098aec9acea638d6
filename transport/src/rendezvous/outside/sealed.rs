//! Values in a store, with the MAC by which ranks of the job recognise each other's.
//!
//! **Invariant:** a value opens only with the secret that sealed it, at the key that it was sealed
//! for. Two values are never equal, even where they say the same.

use crate::auth::{Secret, TAG_BYTES, random_bytes};
use crate::wire::{Malformed, Reader, Writer};

const VERSION: u8 = 1;

/// Random bytes of each value.
const NONCE_BYTES: usize = 12;

/// A value that is no value of this job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rendezvous) struct Forged;

impl From<Malformed> for Forged {
    fn from(Malformed: Malformed) -> Self {
        Self
    }
}

/// The bytes of a value at a key.
pub(in crate::rendezvous) fn seal(secret: &Secret, key: &str, value: &[u8]) -> Vec<u8> {
    let nonce: [u8; NONCE_BYTES] = random_bytes();
    let writer = Writer::default().u8(VERSION).raw(&nonce).bytes(value);
    let body = writer.finish();
    let tag = secret.tag_of_store(key, &body);
    Writer::default().raw(&body).raw(&tag).finish()
}

/// The value of these bytes, which lie at a key.
pub(in crate::rendezvous) fn open(secret: &Secret, key: &str, bytes: &[u8]) -> Result<Vec<u8>, Forged> {
    let (body, tag) = parts(bytes)?;
    if !secret.is_tag_of_store(key, body, tag) {
        return Err(Forged);
    }
    value(body)
}

fn parts(bytes: &[u8]) -> Result<(&[u8], &[u8; TAG_BYTES]), Forged> {
    bytes.split_last_chunk::<TAG_BYTES>().ok_or(Forged)
}

fn value(body: &[u8]) -> Result<Vec<u8>, Forged> {
    let mut reader = Reader::new(body);
    if reader.u8()? != VERSION {
        return Err(Forged);
    }
    let _nonce: [u8; NONCE_BYTES] = reader.array()?;
    let value = reader.bytes(super::SEALED_BYTES_MAX)?.to_vec();
    reader.end()?;
    Ok(value)
}

/// See [`super::check_decoders`].
pub(super) fn check_decoder(bytes: &[u8]) {
    let secret = Secret::new(b"of a test: sixteen bytes and more");
    // Without the MAC, which no input would pass.
    if let Ok((body, _)) = parts(bytes)
        && let Ok(value) = value(body)
    {
        assert!(value.len() <= body.len());
    }
    if let Ok(value) = open(&secret, "a key", bytes) {
        assert_eq!(open(&secret, "a key", &seal(&secret, "a key", &value)), Ok(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_opens_with_its_secret_at_its_key_and_no_bit_of_it_may_change() {
        let (secret, other) = (Secret::new(&[7; 32]), Secret::new(&[8; 32]));
        let sealed = seal(&secret, "record/7", b"who is there");
        assert_eq!(open(&secret, "record/7", &sealed), Ok(b"who is there".to_vec()));
        assert_eq!(open(&other, "record/7", &sealed), Err(Forged));
        assert_eq!(open(&secret, "record/8", &sealed), Err(Forged), "a replay at another number");
        assert_ne!(sealed, seal(&secret, "record/7", b"who is there"), "values differ");
        for bit in 0..8 * sealed.len() {
            let mut changed = sealed.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&secret, "record/7", &changed), Err(Forged), "bit {bit}");
        }
        for end in 0..sealed.len() {
            assert_eq!(open(&secret, "record/7", &sealed[..end]), Err(Forged), "cut at {end}");
        }
    }
}
