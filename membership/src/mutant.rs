//! Rules of the protocol that can be broken, so that tests show that the checkers find it.

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// A member that does not answer counts as dead.
    SilenceIsDeath,
    /// A certificate counts whatever record it names, and that record is not adopted.
    CertificateWithoutRecord,
    /// A proposer counts votes of its ballot after its promise of a higher one.
    LowerBallotsCounted,
    /// A member is told that a step is committed when one member knows that all are ready.
    ToldByOne,
}
