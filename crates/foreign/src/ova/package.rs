//! [`Package`]: an OVA file and what is in it.

use std::collections::HashSet;
use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};

use super::descriptor::Descriptor;
use super::manifest::Manifest;
use super::member::MemberStorage;
use super::plain_name;
use super::tar::{self, BLOCK_BYTES, Block, Kind};
use crate::CheckReport;
use crate::fields::read_at;

/// Headers that are read, extensions among them.
const MAX_HEADERS: usize = 1 << 13;
/// The longest extension of a header; names are in them.
const MAX_EXTENSION_BYTES: u64 = 1 << 16;
/// Descriptors have some 10 KiB, and some have licences in several languages.
const MAX_DESCRIPTOR_BYTES: u64 = 1 << 20;
const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Members that a message names.
const MAX_TOLD: usize = 16;

/// A file in a package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its name, without a `./`.
    pub name: String,
    /// Where its bytes begin in the package.
    pub offset_bytes: u64,
    /// How many there are.
    pub size_bytes: u64,
}

/// An OVA file that is open.
#[derive(Debug)]
pub struct Package {
    file: Arc<dyn Storage>,
    members: Vec<Member>,
    descriptor: Descriptor,
    manifest: Option<Manifest>,
    /// Names of manifests that are not called as the descriptor is.
    strays: Vec<String>,
    /// Members that no manifest has sums of: itself and the certificate.
    without_sums: Vec<String>,
    certificate: Option<String>,
}

impl Package {
    /// Finds out what is in a file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] if it is no tar file with a descriptor in it, or has members
    /// that it does not hold whole; what the storage says.
    pub async fn open(file: Arc<dyn Storage>) -> Result<Package> {
        let named = |error: Error| error.target(file.name());
        let members = members(&*file).await.map_err(named)?;
        let by_end = |end: &str| {
            let mut all = members.iter();
            all.find(|member| ends_with(&member.name, end))
        };
        let Some(descriptor) = by_end(".ovf") else {
            let message =
                "the tar file has no OVF descriptor: this is no package of a virtual machine";
            return Err(Error::new(ErrorKind::InvalidImage, "open", message).target(file.name()));
        };
        // What belongs to the descriptor is called as it is.
        let stem = descriptor.name.get(..descriptor.name.len() - ".ovf".len());
        let beside = |end: &str| {
            let name = format!("{}{end}", stem.unwrap_or_default());
            members.iter().find(|member| member.name == name)
        };
        let text = whole(&*file, descriptor, MAX_DESCRIPTOR_BYTES);
        let mut descriptor = Descriptor::decode(&text.await.map_err(named)?).map_err(named)?;
        decode_references(&mut descriptor, &members);
        let manifest = match beside(".mf") {
            None => None,
            Some(member) => {
                let text = whole(&*file, member, MAX_MANIFEST_BYTES);
                Some(Manifest::decode(&text.await.map_err(named)?))
            }
        };
        let certificate = beside(".cert").map(|member| member.name.clone());
        let own_manifest = beside(".mf").map(|member| member.name.clone());
        let others = members.iter().map(|member| &member.name);
        let others =
            others.filter(|name| ends_with(name, ".mf") && Some(*name) != own_manifest.as_ref());
        Ok(Package {
            strays: others.cloned().collect(),
            without_sums: own_manifest
                .into_iter()
                .chain(certificate.clone())
                .collect(),
            file,
            members,
            descriptor,
            manifest,
            certificate,
        })
    }

    /// The file.
    pub fn file(&self) -> &Arc<dyn Storage> {
        &self.file
    }

    /// What is in it, in its order.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// What the descriptor says.
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// What the manifest says, if there is one.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// The name of the certificate, if there is one. Nothing here looks at it.
    pub fn certificate(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    /// The members that are files of virtual disks, in the descriptor's order.
    pub fn disks(&self) -> Vec<&Member> {
        let mut found: Vec<&Member> = Vec::new();
        for disk in &self.descriptor.disks {
            let file = self.descriptor.file_of(disk);
            let member = file.and_then(|file| self.find(&file.href));
            if let Some(member) = member.filter(|member| !found.contains(member)) {
                found.push(member);
            }
        }
        found
    }

    fn find(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }

    /// A member by name; without one the only disk.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such member, [`ErrorKind::InvalidArgument`] if there are several
    /// disks and none is named, [`ErrorKind::Unsupported`] if its bytes are not those of the disk.
    pub fn storage(&self, name: Option<&str>) -> Result<Arc<MemberStorage>> {
        let member = match name {
            Some(name) => self.find(plain_name(name)).ok_or_else(|| {
                let names = told(self.members.iter());
                let message = format!("the package has no member '{name}'; it has {names}");
                self.error(ErrorKind::NotFound, message)
            })?,
            None => self.only_disk()?,
        };
        let described = self.descriptor.file_named(&member.name);
        if let Some(how) = described.and_then(|file| file.compression.as_deref()) {
            let how = how.escape_debug();
            let message = format!("the member '{}' is compressed ({how})", member.name);
            return Err(self.error(ErrorKind::Unsupported, message));
        }
        Ok(self.window(member))
    }

    fn only_disk(&self) -> Result<&Member> {
        let disks = self.disks();
        match &disks[..] {
            [one] => Ok(one),
            [] => {
                let message = "the package has no disk in one piece".to_owned();
                Err(self.error(ErrorKind::NotFound, message))
            }
            [first, ..] => {
                let names = told(disks.iter().copied());
                let message = format!(
                    "the package has {} disks, {names}: name one, as in '{}#{}'",
                    disks.len(),
                    self.file.name(),
                    first.name
                );
                Err(self.error(ErrorKind::InvalidArgument, message))
            }
        }
    }

    fn window(&self, member: &Member) -> Arc<MemberStorage> {
        let sums = self.manifest.iter();
        let sums: Vec<_> = sums
            .flat_map(|manifest| manifest.sums_of(&member.name).cloned())
            .collect();
        let doubt = self.doubts().into_iter().next();
        let doubt = doubt.or_else(|| self.is_without_sum(member).then(|| no_sum_of(member)));
        MemberStorage::new(self.file.clone(), member.clone(), sums, doubt)
    }

    /// Why the manifest does not tell whether the package is whole.
    fn doubts(&self) -> Vec<String> {
        let strays = self.strays.iter().map(|name| {
            format!(
                "'{name}' is not called as the descriptor is: nothing tells whether it is the manifest"
            )
        });
        let lines = self.manifest.iter().flat_map(|one| &one.unreadable_lines);
        let lines = lines.map(|line| format!("line {line} of the manifest cannot be read"));
        strays.chain(lines).collect()
    }

    /// Whether there is a manifest that ought to have a sum of a member, and has none.
    fn is_without_sum(&self, member: &Member) -> bool {
        let manifest = self.manifest.as_ref();
        !self.without_sums.contains(&member.name)
            && manifest.is_some_and(|manifest| manifest.sums_of(&member.name).next().is_none())
    }

    fn error(&self, kind: ErrorKind, message: String) -> Error {
        Error::new(kind, "open", message).target(self.file.name())
    }

    /// Compares all members with the manifest, and what is there with the descriptor.
    ///
    /// # Errors
    /// What the storage says; whatever is wrong with the package is in the report.
    pub async fn check(&self) -> Result<CheckReport> {
        let mut report = CheckReport::default();
        for file in &self.descriptor.files {
            let is_elsewhere = file.href.contains("://");
            match self.find(&file.href) {
                // In pieces, which the manifest has.
                None if is_elsewhere || file.chunk_bytes.is_some() => {}
                None => report.corruption(format!(
                    "ERROR the descriptor names '{}', which is not in the package",
                    file.href
                )),
                Some(member)
                    if file
                        .size_bytes
                        .is_some_and(|size| size != member.size_bytes) =>
                {
                    report.corruption(format!(
                        "ERROR '{}' has {} bytes, and {} by the descriptor",
                        member.name,
                        member.size_bytes,
                        file.size_bytes.unwrap_or_default()
                    ));
                }
                Some(_) => {}
            }
        }
        for doubt in self.doubts() {
            report.corruption(format!("ERROR {doubt}"));
        }
        let Some(manifest) = &self.manifest else {
            report.message(
                "The package has no manifest: its members have nothing to be compared with.",
            );
            return Ok(report);
        };
        let names: HashSet<&str> = self.members.iter().map(|member| &*member.name).collect();
        let unknown = manifest
            .sums
            .iter()
            .filter(|sum| !names.contains(&*sum.member));
        for sum in unknown {
            report.corruption(format!(
                "ERROR the manifest names '{}', which is not in the package",
                sum.member
            ));
        }
        for member in &self.members {
            if self.is_without_sum(member) {
                report.corruption(format!("ERROR {}", no_sum_of(member)));
            }
            match self.window(member).compare().await {
                Err(error) if error.kind() == ErrorKind::InvalidImage => {
                    report.corruption(format!("ERROR {}", error.message()));
                }
                other => other?,
            }
        }
        Ok(report)
    }
}

fn no_sum_of(member: &Member) -> String {
    format!("the manifest has no sum of '{}'", member.name)
}

/// References are written as URIs, in which `%20` stands for a space, say. A member that is called as it is written there
/// is meant all the same.
fn decode_references(descriptor: &mut Descriptor, members: &[Member]) {
    for file in &mut descriptor.files {
        let is_member = members.iter().any(|member| member.name == file.href);
        if let (false, Some(decoded)) = (is_member, percent_decoded(&file.href)) {
            file.href = plain_name(&decoded).to_owned();
        }
    }
}

/// A text without escapes of URIs; `None` where they are none.
fn percent_decoded(text: &str) -> Option<String> {
    let (mut decoded, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let (digits, behind) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok()?;
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        decoded.push(u8::from_str_radix(digits, 16).ok().filter(|_| is_hex)?);
        rest = behind;
    }
    String::from_utf8(decoded).ok()
}

fn ends_with(name: &str, end: &str) -> bool {
    let start = name.len().checked_sub(end.len());
    start
        .and_then(|start| name.get(start..))
        .is_some_and(|rest| rest.eq_ignore_ascii_case(end))
}

/// Names for a message.
fn told<'a>(members: impl Iterator<Item = &'a Member>) -> String {
    let mut names = members.map(|member| format!("'{}'", member.name));
    let mut told: Vec<String> = names.by_ref().take(MAX_TOLD).collect();
    match names.count() {
        0 => {}
        more => told.push(format!("{more} more")),
    }
    told.join(", ")
}

/// The bytes of a small member.
async fn whole(file: &dyn Storage, member: &Member, limit_bytes: u64) -> Result<Vec<u8>> {
    if member.size_bytes > limit_bytes {
        let message = format!(
            "'{}' has {} bytes, and {limit_bytes} are the most that is read",
            member.name, member.size_bytes
        );
        return Err(Error::new(ErrorKind::InvalidImage, "open", message));
    }
    let bytes = read_at(file, member.offset_bytes, member.size_bytes as usize).await?;
    Ok(bytes.to_vec())
}

/// Follows the headers of a tar file.
async fn members(file: &dyn Storage) -> Result<Vec<Member>> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidImage, "open", message);
    let end_bytes = file.len_bytes()?;
    let block_bytes = BLOCK_BYTES as u64;
    let (mut members, mut names) = (Vec::new(), HashSet::new());
    let (mut at, mut extended) = (0_u64, tar::Extended::default());
    for _ in 0..MAX_HEADERS {
        // Whoever forgets the zeroes at the end has members all the same.
        if end_bytes.saturating_sub(at) < block_bytes {
            return Ok(members);
        }
        let block = read_at(file, at, BLOCK_BYTES).await?;
        let Some(block) = block.first_chunk() else {
            return Ok(members);
        };
        let Block::Header(header) = tar::decode(block)? else {
            return Ok(members);
        };
        let offset_bytes = at + block_bytes;
        let size_bytes = match header.kind {
            Kind::File => extended.size_bytes.unwrap_or(header.size_bytes),
            _ => header.size_bytes,
        };
        let ends_bytes = offset_bytes.checked_add(size_bytes);
        let Some(ends_bytes) = ends_bytes.filter(|&ends| ends <= end_bytes) else {
            let name = String::from_utf8_lossy(&header.name)
                .escape_debug()
                .to_string();
            return Err(invalid(format!(
                "the file ends before its member '{name}' does"
            )));
        };
        match header.kind {
            Kind::File => {
                let taken = std::mem::take(&mut extended);
                let name = name(&taken.name.unwrap_or(header.name))?;
                if !names.insert(name.clone()) {
                    return Err(invalid(format!("the package has two members '{name}'")));
                }
                members.push(Member {
                    name,
                    offset_bytes,
                    size_bytes,
                });
            }
            Kind::LongName | Kind::Extended => {
                let bytes = extension(file, offset_bytes, size_bytes).await?;
                extend(&mut extended, header.kind, &bytes)?;
            }
            // It may be about a folder.
            Kind::Other => extended = tar::Extended::default(),
        }
        at = ends_bytes.next_multiple_of(block_bytes);
    }
    Err(invalid("the tar file has too many members".to_owned()))
}

async fn extension(file: &dyn Storage, offset_bytes: u64, size_bytes: u64) -> Result<Vec<u8>> {
    if size_bytes > MAX_EXTENSION_BYTES {
        let message = "the tar file has an extension that is too long";
        return Err(Error::new(ErrorKind::InvalidImage, "open", message));
    }
    let bytes = read_at(file, offset_bytes, size_bytes as usize).await?;
    Ok(bytes.to_vec())
}

/// Adds what an extension says of the next member.
fn extend(extended: &mut tar::Extended, kind: Kind, bytes: &[u8]) -> Result<()> {
    if kind == Kind::LongName {
        extended.name = Some(crate::fields::until_nul(bytes).to_vec());
        return Ok(());
    }
    let more = tar::decode_extended(bytes)?;
    extended.name = more.name.or(extended.name.take());
    extended.size_bytes = more.size_bytes.or(extended.size_bytes);
    Ok(())
}

/// A name that can be shown, and written behind the package's.
fn name(bytes: &[u8]) -> Result<String> {
    let name = std::str::from_utf8(bytes).map(plain_name).ok();
    // What stands behind the last '#' of a name is a member's.
    let is_plain = |name: &&str| !name.is_empty() && !name.contains(char::is_control);
    let name = name.filter(|name| is_plain(name) && !name.contains('#'));
    name.map(str::to_owned).ok_or_else(|| {
        let message = "the package has a member without a name that can be shown";
        Error::new(ErrorKind::InvalidImage, "open", message)
    })
}

#[cfg(test)]
mod tests;
