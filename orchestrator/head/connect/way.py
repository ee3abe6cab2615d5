"""Chooses how a host is reached: by fabric (paramiko), or by the ssh program where only that can.

The choice is a pure function of the output of `ssh -G`, of known_hosts and of a few facts about
this machine. An option that is not listed here and differs from ssh's default requires ssh. So does
a host that is not in known_hosts yet: ssh adds it, and fabric can reach it from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.head.connect.known_hosts import KnownLine
from orchestrator.head.connect.ssh_config import Settings

# Options that fabric, or our use of it, obeys.
OBEYED = {
    *("host", "hostname", "user", "port", "identityfile", "identitiesonly", "proxyjump"),
    *("userknownhostsfile", "globalknownhostsfile", "hashknownhosts", "hostkeyalias"),
    *("connecttimeout", "connectionattempts"),
}
# Options of terminals, forwarding, passwords and masters. They change neither the host that is
# reached nor the keys that are accepted. If no key is accepted, ssh tries Kerberos or hostbased
# authentication.
WITHOUT_EFFECT = {
    *("addkeystoagent", "batchmode", "canonicaldomains", "canonicalizefallbacklocal"),
    *("canonicalizehostname", "canonicalizemaxdots", "canonicalizepermittedcnames"),
    *("casignaturealgorithms", "clearallforwardings", "compression", "controlmaster"),
    *("controlpath", "controlpersist", "dynamicforward", "enableescapecommandline"),
    *("enablesshkeysign", "escapechar", "exitonforwardfailure", "fingerprinthash"),
    *("forkafterauthentication", "forwardagent", "forwardx11", "forwardx11timeout"),
    *("forwardx11trusted", "gatewayports", "gssapiauthentication", "gssapidelegatecredentials"),
    *("gssapikexalgorithms", "gssapirenewalforcesrekey", "gssapitrustdns", "ignoreunknown"),
    *("hostbasedacceptedalgorithms", "hostbasedauthentication", "ipqos"),
    *("kbdinteractiveauthentication", "localcommand", "localforward", "loglevel", "logverbose"),
    *("numberofpasswordprompts", "obscurekeystroketiming", "passwordauthentication"),
    *("permitlocalcommand", "permitremoteopen", "preferredauthentications", "rekeylimit"),
    *("remotecommand", "remoteforward", "requesttty", "sendenv", "serveralivecountmax"),
    *("serveraliveinterval", "sessiontype", "setenv", "stdinnull", "streamlocalbindmask"),
    *("streamlocalbindunlink", "syslogfacility", "tag", "tcpkeepalive", "tunnel"),
    *("tunneldevice", "updatehostkeys", "visualhostkey", "warnweakcrypto", "xauthlocation"),
}
KNOWN = OBEYED | WITHOUT_EFFECT
KINDS_OF_KEY = {
    *("ssh-ed25519", "ssh-rsa"),
    *("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
}
CHECKED = ("ask", "accept-new", "yes", "true")


class Way(NamedTuple):
    """The program that reaches a host, and the reason for the choice."""

    # "fabric", "ssh", "srun" or "local".
    program: str
    why: str

    @property
    def by_ssh(self) -> bool:
        return self.program == "ssh"

    def __str__(self) -> str:
        return f"{self.program} ({self.why})"


@dataclass(frozen=True)
class Here:
    """The facts about this machine on which the choice depends."""

    has_ssh: bool = True
    # True if the user's ssh holds a connection to the host (ControlMaster).
    master: bool = False
    # The path of a certificate for one of the user's keys, or "".
    certificate: str = ""


def choose_way(
    settings: Settings, defaults: Settings, known: Sequence[KnownLine], here: Here
) -> Way:
    """Return the Way to a host with these settings and these lines of known_hosts."""
    if not here.has_ssh:
        return Way("fabric", "no ssh program is installed here")
    if here.master:
        return Way("ssh", "your ssh holds a connection to it")
    for keyword in sorted(settings.keys() | defaults.keys()):
        values = settings.get(keyword, ())
        if keyword in ("identityfile", "proxyjump") and any(
            "%" in value or "$" in value for value in values
        ):
            return Way("ssh", f"{keyword} has a token of ssh's")
        if keyword in KNOWN or values == defaults.get(keyword, ()):
            continue
        if keyword == "stricthostkeychecking" and values[:1] in [(word,) for word in CHECKED]:
            continue
        return Way("ssh", f"{keyword} is set in your ssh_config")
    if not known:
        return Way("ssh", "known_hosts does not have it yet")
    # The blob of the known key of each kind.
    keys: dict[str, bytes] = {}
    for line in known:
        if line.needs_ssh or line.kind not in KINDS_OF_KEY:
            return Way("ssh", f"{line.where} has {line.needs_ssh or line.kind}")
        if keys.setdefault(line.kind, line.blob) != line.blob:
            return Way("ssh", f"{line.where} is a second {line.kind} key of it")
    if here.certificate:
        return Way("ssh", f"{here.certificate} is a certificate")
    return Way("fabric", "nothing asks for ssh itself")
