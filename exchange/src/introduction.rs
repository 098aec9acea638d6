//! Introductions: what two programs tell each other, in any RPC, to build a link beside it.
//!
//! An [`Introduction`] begins with the versions of the protocol that its program speaks. These come
//! first in every version. Where two programs share no version, nothing else is read, and
//! tensors go inline. Then come fields, each with a tag and a length: an unknown field is skipped,
//! so a newer version may add some.
//!
//! **Invariant:** an introduction has at most [`INTRODUCTION_BYTES_MAX`] bytes. What decodes has
//! each field of its version once, in its length, and an address of printable characters. It is
//! still a claim: the address and the host prove nothing, and the challenge is answered on the link
//! by who knows the secret.

use std::fmt;
use std::ops::RangeInclusive;

use pleach_transport::Address;
use pleach_transport::auth::TAG_BYTES;
use pleach_transport::device::Protection;
use pleach_vocabulary::Fabric;

/// Longest introduction, in bytes.
pub const INTRODUCTION_BYTES_MAX: usize = 512;

/// Longest address, in bytes.
pub const ADDRESS_BYTES_MAX: usize = 255;

/// The versions of the protocol that this program speaks.
pub const VERSIONS: RangeInclusive<u16> = 1..=1;

const MAGIC: [u8; 8] = *b"pleach\0x";

/// The ways by which a program can move bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fabrics {
    /// Shared memory of one host.
    pub shm: bool,
    /// TCP sockets.
    pub tcp: bool,
    /// RDMA.
    pub verbs: bool,
}

/// What a program says of itself. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// The host, and its space of process numbers; zero: unknown.
    pub host: [u8; 16],
    /// A number that the program has drawn at its start.
    pub incarnation: u64,
    /// What it can use.
    pub fabrics: Fabrics,
    /// Where it takes connections.
    pub address: Address,
    /// Random bytes, which the other end answers on the link.
    pub challenge: [u8; TAG_BYTES],
    /// How this end protects the link. In clear where it is not said.
    pub protection: Protection,
}

/// A field of an introduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Field {
    /// [`Introduction::host`].
    Host = 1,
    /// [`Introduction::incarnation`].
    Incarnation = 2,
    /// [`Introduction::fabrics`].
    Fabrics = 3,
    /// [`Introduction::address`].
    Address = 4,
    /// [`Introduction::challenge`].
    Challenge = 5,
    /// [`Introduction::protection`].
    Protection = 6,
}

/// Why there is no introduction. Tensors go inline then.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IntroductionError {
    /// It is too long.
    #[error("an introduction has at most {INTRODUCTION_BYTES_MAX} bytes, and this one has {bytes}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It is something else.
    #[error("these bytes are no introduction of pleach")]
    Unknown,
    /// The two programs have no version in common.
    #[error(
        "the other program speaks versions {oldest} to {newest} of the exchange, this one {} to {}; give both \
         the same version of pleach",
        VERSIONS.start(), VERSIONS.end()
    )]
    NoSharedVersion {
        /// The oldest version of the other program.
        oldest: u16,
        /// The newest version of the other program.
        newest: u16,
    },
    /// It ends inside of a field.
    #[error("an introduction ends inside of a field")]
    Truncated,
    /// A field comes twice.
    #[error("an introduction has the field {field:?} twice")]
    Repeated {
        /// The field.
        field: Field,
    },
    /// A field is not there.
    #[error("an introduction has no field {field:?}")]
    Missing {
        /// The field.
        field: Field,
    },
    /// A field has the wrong length, or the address characters that are not printable.
    #[error("an introduction has a malformed {field:?} of {bytes} bytes")]
    Malformed {
        /// The field.
        field: Field,
        /// Its length.
        bytes: usize,
    },
}

/// As `shm, tcp`.
impl fmt::Display for Fabrics {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(self.shm, "shm"), (self.tcp, "tcp"), (self.verbs, "verbs")];
        let names: Vec<&str> = names.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect();
        if names.is_empty() { formatter.write_str("none") } else { formatter.write_str(&names.join(", ")) }
    }
}

impl Fabrics {
    fn bits(self) -> u32 {
        u32::from(self.shm) | u32::from(self.tcp) << 1 | u32::from(self.verbs) << 2
    }

    /// Bits of later versions are left out.
    fn of_bits(bits: u32) -> Self {
        Self { shm: bits & 1 != 0, tcp: bits & 2 != 0, verbs: bits & 4 != 0 }
    }
}

impl Introduction {
    /// As it is sent.
    ///
    /// # Errors
    ///
    /// When the address is too long or is not printable.
    pub fn encode(&self) -> Result<Vec<u8>, IntroductionError> {
        check_address(self.address.0.as_bytes())?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSIONS.start().to_le_bytes());
        bytes.extend(VERSIONS.end().to_le_bytes());
        let fields: [(Field, &[u8]); Field::ALL.len()] = [
            (Field::Host, &self.host),
            (Field::Incarnation, &self.incarnation.to_le_bytes()),
            (Field::Fabrics, &self.fabrics.bits().to_le_bytes()),
            (Field::Address, self.address.0.as_bytes()),
            (Field::Challenge, &self.challenge),
            (Field::Protection, protection_content(self.protection)),
        ];
        // Who protects nothing says what programs say that know no protection.
        let said = fields.len() - usize::from(self.protection == Protection::Clear);
        for (field, content) in fields.into_iter().take(said) {
            bytes.extend((field as u16).to_le_bytes());
            // An address is the longest.
            bytes.extend((content.len() as u16).to_le_bytes());
            bytes.extend(content);
        }
        Ok(bytes)
    }

    /// Reads an introduction, with the newest version that both programs speak.
    ///
    /// # Errors
    ///
    /// See [`IntroductionError`].
    pub fn decode(bytes: &[u8]) -> Result<(u16, Self), IntroductionError> {
        if bytes.len() > INTRODUCTION_BYTES_MAX {
            return Err(IntroductionError::TooLong { bytes: bytes.len() });
        }
        let rest = bytes.strip_prefix(&MAGIC).ok_or(IntroductionError::Unknown)?;
        let ([oldest, newest], rest) = numbers(rest).ok_or(IntroductionError::Unknown)?;
        let version = newest.min(*VERSIONS.end());
        if oldest > newest || version < oldest.max(*VERSIONS.start()) {
            return Err(IntroductionError::NoSharedVersion { oldest, newest });
        }
        let fields = Fields::read(rest)?;
        let address = check_address(fields.find(Field::Address)?)?;
        let introduction = Self {
            host: fields.array(Field::Host)?,
            incarnation: u64::from_le_bytes(fields.array(Field::Incarnation)?),
            fabrics: Fabrics::of_bits(u32::from_le_bytes(fields.array(Field::Fabrics)?)),
            address: Address(address.to_owned()),
            challenge: fields.array(Field::Challenge)?,
            protection: match fields.get(Field::Protection) {
                None => Protection::Clear,
                Some(content) => protection_of(content)?,
            },
        };
        Ok((version, introduction))
    }

    /// The best fabric that both programs have: shared memory on one host, then RDMA, then sockets.
    #[must_use]
    pub fn shared_fabric(&self, other: &Self) -> Option<Fabric> {
        let (own, theirs) = (self.fabrics, other.fabrics);
        let is_one_host = self.host == other.host && self.host != [0; 16];
        let fabrics = [
            (Fabric::Shm, is_one_host && own.shm && theirs.shm),
            (Fabric::Verbs, own.verbs && theirs.verbs),
            (Fabric::Tcp, own.tcp && theirs.tcp),
        ];
        fabrics.into_iter().find(|(_, has)| *has).map(|(fabric, _)| fabric)
    }
}

/// A protection as it is sent.
fn protection_content(protection: Protection) -> &'static [u8] {
    match protection {
        Protection::Clear => &[0],
        Protection::Secret => &[1],
        Protection::Certificates => &[2],
    }
}

/// No protection is not said.
fn protection_of(content: &[u8]) -> Result<Protection, IntroductionError> {
    let known = [Protection::Secret, Protection::Certificates];
    let found = known.into_iter().find(|known| protection_content(*known) == content);
    found.ok_or(IntroductionError::Malformed { field: Field::Protection, bytes: content.len() })
}

/// The fields that this version knows.
struct Fields<'a>([Option<&'a [u8]>; Field::ALL.len()]);

impl Field {
    const ALL: [Self; 6] =
        [Self::Host, Self::Incarnation, Self::Fabrics, Self::Address, Self::Challenge, Self::Protection];
}

impl<'a> Fields<'a> {
    fn read(mut rest: &'a [u8]) -> Result<Self, IntroductionError> {
        let mut fields = [None; Field::ALL.len()];
        while !rest.is_empty() {
            let ([tag, length], content) = numbers(rest).ok_or(IntroductionError::Truncated)?;
            let split = content.split_at_checked(usize::from(length));
            let (content, behind) = split.ok_or(IntroductionError::Truncated)?;
            rest = behind;
            let Some(place) = Field::ALL.iter().position(|field| *field as u16 == tag) else { continue };
            if fields[place].replace(content).is_some() {
                return Err(IntroductionError::Repeated { field: Field::ALL[place] });
            }
        }
        Ok(Self(fields))
    }

    fn get(&self, field: Field) -> Option<&'a [u8]> {
        self.0[Field::ALL.iter().position(|one| *one == field)?]
    }

    fn find(&self, field: Field) -> Result<&'a [u8], IntroductionError> {
        self.get(field).ok_or(IntroductionError::Missing { field })
    }

    fn array<const N: usize>(&self, field: Field) -> Result<[u8; N], IntroductionError> {
        let content = self.find(field)?;
        content.try_into().map_err(|_| IntroductionError::Malformed { field, bytes: content.len() })
    }
}

/// Two numbers at the beginning of bytes.
fn numbers(bytes: &[u8]) -> Option<([u16; 2], &[u8])> {
    let ([a, b, c, d], rest) = bytes.split_first_chunk()?;
    Some(([u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d])], rest))
}

/// An address is text that may be printed.
fn check_address(address: &[u8]) -> Result<&str, IntroductionError> {
    let is_address =
        (1..=ADDRESS_BYTES_MAX).contains(&address.len()) && address.iter().all(u8::is_ascii_graphic);
    let text = std::str::from_utf8(address).ok().filter(|_| is_address);
    text.ok_or(IntroductionError::Malformed { field: Field::Address, bytes: address.len() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn introduction() -> Introduction {
        Introduction {
            host: *b"0123456789abcdef",
            incarnation: 7,
            fabrics: Fabrics { shm: true, tcp: true, verbs: false },
            address: Address("127.0.0.1:50051".to_owned()),
            challenge: [0x5a; TAG_BYTES],
            protection: Protection::Clear,
        }
    }

    /// The introduction with these versions and with further bytes.
    fn changed(versions: [u16; 2], more: &[u8]) -> Vec<u8> {
        let mut bytes = introduction().encode().expect("is good");
        bytes[8..10].copy_from_slice(&versions[0].to_le_bytes());
        bytes[10..12].copy_from_slice(&versions[1].to_le_bytes());
        bytes.extend(more);
        bytes
    }

    #[test]
    fn an_introduction_is_the_same_bytes_in_every_build() {
        let bytes = introduction().encode().expect("is good");
        assert_eq!(bytes, include_bytes!("../../fuzz/corpus/exchange_message/introduction"));
        assert_eq!(Introduction::decode(&bytes), Ok((1, introduction())));
    }

    #[test]
    fn the_longest_introduction_keeps_to_the_limit() {
        let (address, protection) = (Address("a".repeat(ADDRESS_BYTES_MAX)), Protection::Certificates);
        let longest = Introduction { address, protection, ..introduction() };
        let bytes = longest.encode().expect("is good");
        assert!(bytes.len() <= INTRODUCTION_BYTES_MAX, "{}", bytes.len());
        assert_eq!(Introduction::decode(&bytes), Ok((1, longest)));
        for address in ["a".repeat(ADDRESS_BYTES_MAX + 1), String::new(), "a b".to_owned(), "ä".to_owned()] {
            let error = IntroductionError::Malformed { field: Field::Address, bytes: address.len() };
            let wrong = Introduction { address: Address(address), ..introduction() };
            assert_eq!(wrong.encode(), Err(error));
        }
        let error = Introduction::decode(&[0; INTRODUCTION_BYTES_MAX + 1]).expect_err("is too long");
        assert_eq!(error, IntroductionError::TooLong { bytes: 513 });
    }

    #[test]
    fn a_newer_program_that_knows_this_version_is_understood() {
        let newer = changed([1, 3], &[200, 0, 2, 0, 1, 2]);
        assert_eq!(newer, include_bytes!("../../fuzz/corpus/exchange_message/introduction_newer"));
        assert_eq!(Introduction::decode(&newer), Ok((1, introduction())));
    }

    #[test]
    fn a_protection_is_said_and_none_is_not() {
        let clear = introduction().encode().expect("is good");
        for (protection, tag) in [(Protection::Secret, 1), (Protection::Certificates, 2)] {
            let protected = Introduction { protection, ..introduction() };
            let bytes = protected.encode().expect("is good");
            assert_eq!(bytes, [&clear[..], &[6, 0, 1, 0, tag]].concat());
            assert_eq!(Introduction::decode(&bytes), Ok((1, protected)));
        }
        for wrong in [&[6, 0, 1, 0, 0][..], &[6, 0, 1, 0, 3], &[6, 0, 0, 0], &[6, 0, 2, 0, 1, 1]] {
            let bytes = [&clear[..], wrong].concat();
            let error = IntroductionError::Malformed { field: Field::Protection, bytes: wrong.len() - 4 };
            assert_eq!(Introduction::decode(&bytes), Err(error));
        }
    }

    #[test]
    fn without_a_shared_version_nothing_else_is_read() {
        let later = include_bytes!("../../fuzz/corpus/exchange_message/introduction_too_new");
        assert!(later.len() < 30, "it holds no field of this version");
        let error = Introduction::decode(later).expect_err("speaks 2 to 3");
        assert_eq!(
            error.to_string(),
            "the other program speaks versions 2 to 3 of the exchange, this one 1 to 1; give both the same \
             version of pleach"
        );
        let older = include_bytes!("../../fuzz/corpus/exchange_message/introduction_too_old");
        assert_eq!(
            Introduction::decode(older),
            Err(IntroductionError::NoSharedVersion { oldest: 0, newest: 0 })
        );
        // Versions that contradict each other are none.
        let error = Introduction::decode(&changed([2, 1], &[])).expect_err("contradicts itself");
        assert_eq!(error, IntroductionError::NoSharedVersion { oldest: 2, newest: 1 });
    }

    #[test]
    fn a_field_that_is_missing_repeated_or_of_another_length_is_named() {
        let good = introduction().encode().expect("is good");
        let error = |bytes: &[u8]| Introduction::decode(bytes).expect_err("is wrong");
        assert_eq!(error(b"pleach"), IntroductionError::Unknown);
        assert_eq!(error(&good[..12]), IntroductionError::Missing { field: Field::Address });
        assert_eq!(error(&good[..good.len() - 1]), IntroductionError::Truncated);
        let without_challenge = &good[..good.len() - TAG_BYTES - 4];
        assert_eq!(error(without_challenge), IntroductionError::Missing { field: Field::Challenge });
        assert_eq!(
            error(&changed([1, 1], &[3, 0, 0, 0])),
            IntroductionError::Repeated { field: Field::Fabrics }
        );
        let mut short = without_challenge.to_vec();
        short.extend([5, 0, 1, 0, 0]);
        assert_eq!(error(&short), IntroductionError::Malformed { field: Field::Challenge, bytes: 1 });
        assert_eq!(error(&short).to_string(), "an introduction has a malformed Challenge of 1 bytes");
    }

    #[test]
    fn the_best_shared_fabric_is_taken() {
        let all = Fabrics { shm: true, tcp: true, verbs: true };
        let here = Introduction { fabrics: all, ..introduction() };
        let there = Introduction { host: [1; 16], ..here.clone() };
        assert_eq!(here.shared_fabric(&here), Some(Fabric::Shm));
        assert_eq!(here.shared_fabric(&there), Some(Fabric::Verbs));
        assert_eq!(here.shared_fabric(&Introduction { host: [1; 16], ..introduction() }), Some(Fabric::Tcp));
        let unknown = Introduction { host: [0; 16], ..here.clone() };
        assert_eq!(unknown.shared_fabric(&unknown), Some(Fabric::Verbs), "two unknown hosts may differ");
        let none = Introduction { fabrics: Fabrics::default(), ..here.clone() };
        assert_eq!(here.shared_fabric(&none), None);
    }

    proptest! {
        #[test]
        fn no_bytes_are_more_than_refused(at in 0_usize..200, bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut changed = introduction().encode().expect("is good");
            let at = at.min(changed.len());
            let end = (at + bytes.len()).min(changed.len());
            changed.splice(at..end, bytes);
            if let Ok((version, introduction)) = Introduction::decode(&changed) {
                prop_assert!(VERSIONS.contains(&version));
                let again = introduction.encode().expect("was decoded");
                prop_assert_eq!(Introduction::decode(&again), Ok((1, introduction)));
            }
        }
    }
}
